"""A thread that does one thing at a time for another one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from . import interrupts

_LOOK_UP_S = 0.2
# A thread that is told to end is at its next safe place within so long; a waiting one hears from its server every
# second, and at once when its connection is closed.
_END_S = 2.0


class Stopped(BaseException):
    """The job was ended because the worker leaves."""


class Helper:
    """A daemon thread: a process that ends does not wait for it for ever."""

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
            interrupts.uninterrupted.stop(self._thread.ident, Stopped())

    def end(self) -> None:
        """No more jobs. An interpreter that ends while a thread is in torch or gRPC aborts the process (the
        thread is unwound through C++), so the thread's own end is waited for, as long as it should take."""
        self._jobs.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # also Stopped: whoever waits is to see it
                future.set_exception(error)
            del item, job, future  # what they hold may be large, and the next job may be long in coming
        interrupts.uninterrupted.forget()


def wait_for(future: Future[Any]) -> None:
    """Until it is done. A signal may raise here: Python runs its handler between two waits, also where the system
    has given the signal to another thread."""
    while not wait([future], timeout=_LOOK_UP_S).done:
        pass
