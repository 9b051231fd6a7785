"""Finds the processes of a running job, and the owner of a connection, in /proc (Linux).

The job's log is too late to hit a process in the moment of its start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...launch.plan.process import SERVER, Child

_PROC = Path("/proc")
_ZOMBIE = "Z"


def job_processes(launcher: int) -> dict[Child, tuple[int, str]]:
    """Returns the running servers and workers of a launcher: pid and state of each.

    A state is the kernel's letter: R runs, S sleeps, T is stopped, D waits for a disk.
    """
    found: dict[Child, tuple[int, str]] = {}
    for agent, _, _ in children_of(launcher):
        for pid, state, argv in children_of(agent):
            if (child := _child_of(argv)) is not None:
                found[child] = pid, state
    return found


def children_of(parent: int) -> Iterator[tuple[int, str, list[str]]]:
    """Yields pid, state and command line of the running children of `parent`."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):  # ended meanwhile
            state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != _ZOMBIE:
                yield int(entry.name), state, (entry / "cmdline").read_text().split("\0")


def _child_of(argv: list[str]) -> Child | None:
    """Returns the process of a job with this command line; None for others, such as the agent's guardian."""
    if "paramserver.ps" in argv:
        shards = [int(word.partition("=")[2]) for word in argv if word.startswith("server.shard=")]
        return Child("server", max(shards, default=0))
    if "paramserver.worker" in argv:
        return Child("worker", int(argv[argv.index("--rank") + 1]))
    return None


def child_of_port(launcher: int, port: int) -> Child | None:
    """Returns the process of the job whose end of a TCP connection has this local port.

    It is never the coordinator, which makes no connections during a run.
    """
    inode = _inode_of(port)
    if inode is None:
        return None
    for child, (pid, _) in job_processes(launcher).items():
        with suppress(OSError):
            for entry in (_PROC / str(pid) / "fd").iterdir() if child != SERVER else ():
                with suppress(OSError):
                    if os.readlink(entry) == f"socket:[{inode}]":
                        return child
    return None


def _inode_of(port: int) -> str | None:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in (_PROC / "net" / name).read_text().splitlines()[1:]:
                columns = row.split()
                if int(columns[1].rpartition(":")[2], 16) == port and columns[9] != "0":
                    return columns[9]
    return None


class Handle:
    """Signals a process, never a later process with the same pid."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Send a signal; does nothing when the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)
