"""A session belongs to the process that made it: a forked child has a copy of it, with connections of its parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from ..common.errors import UsageError

_GUARD = (
    'put the training under `if __name__ == "__main__":`, so that only the script\'s own process runs it; a child '
    "process computes, and gives its results to its parent"
)
_MARK = "PARAMSERVER_SESSION"  # environment variable: process, rank and server of a session, for child processes
_PR_SET_PDEATHSIG = 1  # prctl.h
_functions: list[Callable[[], None]] = []  # to be called at exit


def at_exit(function: Callable[[], None]) -> None:
    """Call `function` when this process exits. A forked child does not call it."""
    _functions.append(function)
    atexit.register(function)


def not_at_exit(function: Callable[[], None]) -> None:
    if function in _functions:
        _functions.remove(function)
    atexit.unregister(function)


def _forget() -> None:
    while _functions:
        atexit.unregister(_functions.pop())


os.register_at_fork(after_in_child=_forget)


def die_with_parent() -> None:
    """End this process when its parent ends, even if that is killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Owner:
    """The process that made a session."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises UsageError in a forked child."""
        if os.getpid() != self._pid:
            raise _is_the_parents(self._pid)


def _is_the_parents(pid: int) -> UsageError:
    return UsageError(f"this session belongs to process {pid}, and process {os.getpid()} is its child", fix=_GUARD)


def mark(rank: int | None, address: str) -> None:
    """Let child processes know that this process trains as `rank`."""
    os.environ[_MARK] = f"{os.getpid()} {rank} {address}"


def unmark() -> None:
    if os.environ.get(_MARK, "").startswith(f"{os.getpid()} "):
        del os.environ[_MARK]


def parent_of(rank: int | None, address: str) -> int | None:
    """The process that trains as this rank and has started this process; None: there is none."""
    pid, _, rest = os.environ.get(_MARK, "").partition(" ")
    if rest != f"{rank} {address}" or int(pid) == os.getpid():
        return None
    try:
        os.kill(int(pid), 0)
    except OSError:
        return None
    return int(pid)


class ParentsSession:
    """What `connect()` returns where a child process runs its parent's script again. It does not join.

    A child that is spawned, as loaders of data may be, runs the top level of the script. Leaving is without effect.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _is_the_parents(self._pid)

    def __enter__(self) -> ParentsSession:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def close(self) -> None: ...
