"""Signals that wait for a safe place.

An exception raised by a signal in the middle of a gRPC operation leaves the call unusable, so that the worker could not
say goodbye. So the handlers of `ps-worker` raise at once only where no operation is under way, and otherwise at its
end, within a second: the server sends a message to a waiting worker that often. Python runs signal handlers on the main
thread only; `stop` ends an operation on another thread (`strategies/delayed_update.py`) at its next safe place.
"""

from __future__ import annotations

import signal
import threading
import time
from types import TracebackType
from typing import Any


class _Depth(threading.local):
    value = 0  # of `with uninterrupted:` blocks that this thread is in


class _Uninterrupted:
    """`with uninterrupted:` holds back the exceptions for this thread until the outermost block ends."""

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
        """Called by a signal handler, for the thread it runs on."""
        if self._depth.value:
            self._pending[threading.get_ident()] = error
        else:
            raise error

    def forget(self) -> None:
        """This thread ends: a pending exception must not reach another thread that gets its number."""
        self._pending.pop(threading.get_ident(), None)

    def stop(self, thread: int, error: BaseException) -> None:
        """Raise `error` on another thread, where it next leaves a block."""
        self._pending[thread] = error


uninterrupted = _Uninterrupted()


def sleep(seconds: float) -> None:
    """Sleep on any thread; a safe place at the end. A signal on the main thread ends it at once."""
    time.sleep(seconds)
    with uninterrupted:
        pass


def install(errors: dict[int, type[BaseException]]) -> None:
    """Map signals to exceptions. The second signal of a kind means now: the default action."""

    def handle(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        uninterrupted.raise_when_safe(errors[number]())

    for number in errors:
        signal.signal(number, handle)
