"""Finds the processes of a running job, and the owner of a connection, in /proc (Linux).

The job's log is too late to hit a process in the moment of its start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...launch.plan.process import SERVER, Child

_PROC = Path("/proc")
_ZOMBIE = "Z"


class Process(NamedTuple):
    """A process of the job. `state`: the kernel's letter: R runs, S sleeps, T is stopped, D waits for a disk."""

    child: Child
    pid: int
    state: str


def job_processes(launcher: int) -> dict[Child, Process]:
    """Returns the running servers and workers of a launcher."""
    found: dict[Child, Process] = {}
    for agent, _, _ in children_of(launcher):
        for pid, state, argv in children_of(agent):
            child = _child_of(argv)
            if child is not None:
                found[child] = Process(child, pid, state)
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
    for child, process in job_processes(launcher).items():
        if child != SERVER and f"socket:[{inode}]" in _open_files(process.pid):
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


def _open_files(pid: int) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(entry))
    return found


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
