"""The processes of a running job, as the kernel knows them (Linux): which there are, and whose a connection is.

Read from /proc and not from the job's log, so that a process can be hit in the moment it starts.
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
    """`state` is the kernel's letter: R runs, S sleeps, T is stopped, D waits for a disk."""

    child: Child
    pid: int
    state: str


def job_processes(launcher: int) -> dict[Child, Process]:
    """The servers and the workers that a launcher has running."""
    found: dict[Child, Process] = {}
    for agent, _, _ in children_of(launcher):
        for pid, state, argv in children_of(agent):
            child = _child_of(argv)
            if child is not None:
                found[child] = Process(child, pid, state)
    return found


def children_of(parent: int) -> Iterator[tuple[int, str, list[str]]]:
    """Number, state and command line of the processes that `parent` has running."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):  # ended meanwhile
            state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != _ZOMBIE:
                yield int(entry.name), state, (entry / "cmdline").read_text().split("\0")


def _child_of(argv: list[str]) -> Child | None:
    """Which process of a job has this command line; None for something else, as the agent's guardian."""
    if "paramserver.ps" in argv:
        return Child("server", _shard_of(argv))
    if "paramserver.worker" in argv:
        return Child("worker", int(argv[argv.index("--rank") + 1]))
    return None


def _shard_of(argv: list[str]) -> int:
    """The last --set counts."""
    return max((int(word.partition("=")[2]) for word in argv if word.startswith("server.shard=")), default=0)


def child_of_port(launcher: int, port: int) -> Child | None:
    """The process of the job whose end of a TCP connection has this local port; never the coordinator, which connects
    to nobody while the run lasts."""
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
    """A process that can be signalled without hitting another one that got its number since."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Harmless when the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)
