"""Threads that do something for another one: one thing at a time each, or the same thing for every shard at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from ...common.errors import ParamServerError
from .client import Lost
from .interrupts import uninterrupted
from .shard import Shard

Result = TypeVar("Result")

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
            uninterrupted.stop(self._thread.ident, Stopped())

    def end(self, timeout_s: float = _END_S) -> None:
        """No more jobs. An interpreter that ends while a thread is in torch or gRPC aborts the process (the
        thread is unwound through C++), so the thread's own end is waited for, as long as it should take."""
        self.dismiss()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def dismiss(self) -> None:
        """No more jobs; the one under way is not waited for."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # also Stopped: whoever waits is to see it
                future.set_exception(error)
            del item, job, future  # what they hold may be large, and the next job may be long in coming
        uninterrupted.forget()


def wait_for(future: Future[Any]) -> None:
    """Until it is done. A signal may raise here: Python runs its handler between two waits, also where the system
    has given the signal to another thread."""
    while not wait([future], timeout=_LOOK_UP_S).done:
        pass


class Pool:
    """Threads for the shards beyond the first."""

    def __init__(self) -> None:
        self._helpers: list[Helper] = []

    def all(self, shards: Sequence[Shard], work: Callable[[Shard], Result]) -> list[Result]:
        """`work` for each shard; their results in order. When one fails, the others' streams are closed, since nothing
        can come of them any more; a refusal is raised rather than the losses that follow from it."""
        if len(shards) == 1:
            return [work(shards[0])]

        def guarded(shard: Shard) -> Result:
            try:
                return work(shard)
            except Exception as error:
                _hang_up(shards)
                if isinstance(error, Lost):
                    raise Lost(f"shard {shard.number} at {shard.client.address}: {error}") from None
                raise

        while len(self._helpers) < len(shards) - 1:
            self._helpers.append(Helper(f"shard {len(self._helpers) + 1}"))
        first: Future[Result] = Future()
        others = [
            helper.submit(partial(guarded, shard)) for helper, shard in zip(self._helpers, shards[1:], strict=False)
        ]
        try:
            try:
                first.set_result(guarded(shards[0]))
            except (Lost, ParamServerError) as error:
                first.set_exception(error)
            for future in others:
                wait_for(future)
        except BaseException:  # interrupted, and about to say goodbye to the first shard
            _hang_up(shards[1:])
            wait(others, _END_S)
            raise
        futures = [first, *others]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        if failures:
            raise next((error for error in failures if not isinstance(error, Lost)), failures[0])
        return [future.result() for future in futures]

    def dismiss(self) -> None:
        """No more work; waits for the threads to end. Their connections must be closed."""
        for helper in self._helpers:
            helper.end()


def _hang_up(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.client.hang_up()
