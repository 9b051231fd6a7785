"""Delays the exceptions of signals until a safe place.

An exception in the middle of a gRPC operation makes the call unusable, so the worker could not say goodbye. The signal
handlers of `ps-worker` therefore raise at once only outside of an operation. Otherwise they raise at its end, within a
second, because the server sends a waiting worker a message that often. Python runs signal handlers only on the main
thread. `stop` ends an operation on another thread (`strategies/delayed_update.py`) at its next safe place.
"""

from __future__ import annotations

import signal
import threading
import time
from types import TracebackType
from typing import Any


class _Depth(threading.local):
    value = 0  # number of `with uninterrupted:` blocks that this thread is in


class _Uninterrupted:
    """`with uninterrupted:` delays the exceptions for this thread until the outermost block ends."""

    def __init__(self) -> None:
        self._depth = _Depth()
        self._pending: dict[int, BaseException] = {}  # by thread

    def __enter__(self) -> None:
        self._depth.value += 1

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self._depth.value -= 1
        if self._depth.value == 0 and kind is None:
            pending = self._pending.pop(threading.get_ident(), None)
            if pending is not None:
                raise pending

    def raise_when_safe(self, error: BaseException) -> None:
        """Raise the error, or delay it inside a block. Called by a signal handler."""
        if self._depth.value:
            self._pending[threading.get_ident()] = error
        else:
            raise error

    def forget(self) -> None:
        """Drop a pending exception at the end of this thread, because another thread may get the same number."""
        self._pending.pop(threading.get_ident(), None)

    def stop(self, thread: int, error: BaseException) -> None:
        """Raise `error` on another thread when it next leaves a block."""
        self._pending[thread] = error


uninterrupted = _Uninterrupted()


def sleep(seconds: float) -> None:
    """Sleep on any thread, with a safe place at the end. A signal on the main thread ends the sleep at once."""
    time.sleep(seconds)
    with uninterrupted:
        pass


def install(errors: dict[int, type[BaseException]]) -> None:
    """Map signals to exceptions. A second signal of a kind takes its default action."""

    def handle(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        uninterrupted.raise_when_safe(errors[number]())

    for number in errors:
        signal.signal(number, handle)
