"""Helper threads, each of which does one job after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from .interrupts import uninterrupted

_LOOK_UP_S = 0.2
# In which a stopped thread reaches its next safe place; a waiting one hears from its server every second, and at once
# when its connection is closed.
END_S = 2.0


class Stopped(BaseException):
    """The job was ended because the worker leaves."""


class Helper:
    """A daemon thread, so that a process that ends does not wait for it for ever."""

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
        """End the job under way at its next safe place, with Stopped."""
        if self._thread.ident is not None and self._thread.is_alive():
            uninterrupted.stop(self._thread.ident, Stopped())

    def end(self, timeout_s: float = END_S) -> None:
        """Take no more jobs, and wait for the thread: an interpreter that ends while a thread is in torch or gRPC
        aborts the process (the thread is unwound through C++)."""
        self.dismiss()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def dismiss(self) -> None:
        """Take no more jobs, and do not wait for the one under way."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # also Stopped: the waiting thread raises it
                future.set_exception(error)
            del item, job, future  # they may refer to much memory, and the next job may come late
        uninterrupted.forget()


def wait_for(future: Future[Any]) -> None:
    """Wait until it is done. A signal may raise here: Python runs its handler between two waits, also where the system
    has given the signal to another thread."""
    while not wait([future], timeout=_LOOK_UP_S).done:
        pass
