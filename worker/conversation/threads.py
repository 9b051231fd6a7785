"""Helper threads that run one job after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from .interrupts import uninterrupted

_LOOK_UP_S = 0.2
# Time for a stopped thread to reach its next safe place. A waiting thread receives a message from its server every
# second, and an error at once when its connection is closed.
END_S = 2.0


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
