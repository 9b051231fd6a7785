"""A process of a few lines that outlives a killed launcher by the moment it takes to clean up.

PR_SET_PDEATHSIG ends the launcher's direct children with it, on Linux. It is not inherited, so
what those have started (the worker processes of a DataLoader) would stay behind. The guardian
reads the process groups in use from a pipe; when the pipe ends, the launcher is gone, and it
kills the groups that are left. It is started as a file of its own, without the package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


class Guardian:
    """The launcher's end of the pipe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guardian, which kills the groups that were not forgotten."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Someone may have killed the guardian; the run does not depend on it.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def guard(lines: Iterable[str]) -> None:
    """Keep the set of groups until the lines end, then kill what is in it."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
