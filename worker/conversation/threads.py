"""Signals that wait until a safe place, and helper threads that run one job after another.

An exception in the middle of a gRPC operation makes the call unusable, so the worker could not say goodbye. The signal
handlers of `ps-worker` therefore raise at once only outside of an operation. Otherwise they raise at its end, within a
second, because the server sends a waiting worker a message that often. Python runs signal handlers only on the main
thread. `stop` ends an operation on another thread (`strategies/delayed_update.py`) at its next safe place.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

_LOOK_UP_S = 0.2
# Time for a stopped thread to reach its next safe place. A waiting thread receives a message from its server every
# second, and an error at once when its connection is closed.
END_S = 2.0


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


class Stopped(BaseException):
    """Ends a job because the worker leaves."""


class Helper:
    """Runs jobs on a daemon thread, which does not block the end of the process."""

    def __init__(self, name: str = "exchange") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        if not self._thread.is_alive():
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """End the current job with Stopped at its next safe place."""
        if self._thread.ident is not None and self._thread.is_alive():
            uninterrupted.stop(self._thread.ident, Stopped())

    def end(self, timeout_s: float = END_S) -> None:
        """Take no more jobs, and wait for the thread.

        If the interpreter exits while a thread is in torch or gRPC, the process aborts (C++ unwinds the thread).
        """
        self.dismiss()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def dismiss(self) -> None:
        """Take no more jobs, and do not wait for the current one."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # also Stopped, which the waiting thread raises
                future.set_exception(error)
            del item, job, future  # these may hold much memory until the next job
        uninterrupted.forget()


def wait_for(future: Future[Any]) -> None:
    """Wait until the future is done. A signal may raise an exception here.

    Python runs a signal handler between two short waits, even if the system gave the signal to another thread.
    """
    while not wait([future], timeout=_LOOK_UP_S).done:
        pass
