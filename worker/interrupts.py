"""Signals that wait for a safe place.

An exception raised by a signal in the middle of a gRPC operation leaves the call unusable, and
the goodbye could not be said any more. So the handlers of `ps-worker` raise at once only where
no operation is under way, and otherwise at its end. A waiting worker hears from its server
every second, so that end is near.
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any


class _Uninterrupted:
    """`with uninterrupted:` holds back the exceptions of signals until the outermost block ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending: BaseException | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0 and self._pending is not None and kind is None:
            pending, self._pending = self._pending, None
            raise pending

    def raise_when_safe(self, error: BaseException) -> None:
        """Called by a signal handler."""
        if self._depth:
            self._pending = error
        else:
            raise error


uninterrupted = _Uninterrupted()


def install(errors: dict[int, type[BaseException]]) -> None:
    """Map signals to exceptions. The second signal of a kind means now: the default action."""

    def handle(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        uninterrupted.raise_when_safe(errors[number]())

    for number in errors:
        signal.signal(number, handle)
