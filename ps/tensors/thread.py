"""Runs tensor work in order on one thread, beside the event loop.

torch releases the GIL in its kernels, so the loop continues to serve while a commit runs. For a small model, the change
to another thread costs more than the work, so all work runs inline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from ...common.errors import DivergedError, ParamServerError

Result = TypeVar("Result")

# Below this size of a contribution, the work is faster than the change of threads (about 60 us both ways).
INLINE_BYTES = 256 << 10


class TensorsBroken(ParamServerError):
    """Earlier tensor work failed, so the tensors are not a valid version, and no further work runs.

    If the weights overflowed, it says so, with that reason.
    """


class _Work(NamedTuple):
    run: Callable[[], Any]
    done: Callable[[Any], Any] | None
    failed: Callable[[Exception], Any] | None
    pauses: bool = False  # True: later work waits for `go_on`


class TensorThread:
    """Runs the work of `submit` and the callbacks of `then` in the order of the calls.

    Work without `failed` changes the weights. If it fails, `is_broken` is set, no other work runs, and the loop calls
    `on_error` once with the exception. That is a DivergedError if weights are no longer finite. Every other exception
    is a bug, since contributions were checked before. Work with `failed` only reads, or changes a payload that is not
    folded yet. If it fails, the loop calls `failed`, and other work continues.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._executor: ThreadPoolExecutor | None = None
        self._begin: Callable[[_Work], object] = self._execute  # here, or on the thread
        self._num_pending = 0
        self._queue: deque[_Work] = deque()  # work that has not begun
        self.is_paused = False
        self.is_broken = False
        self._broken: Exception = TensorsBroken("earlier work on the weights failed, so their state is unknown")
        self.busy_s = 0.0  # total time of all work

    def size_for(self, num_bytes: int) -> None:
        """Decide by the size of a contribution whether work runs inline. Call this before any work."""
        if num_bytes > INLINE_BYTES:
            executor = self._executor = ThreadPoolExecutor(1, thread_name_prefix="tensors")
            self._begin = lambda work: executor.submit(self._execute, work)
            # Use half of the cores, since the others receive and send. Windows of 4 MiB do not need more threads.
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
            self._loop = asyncio.get_running_loop()
        else:
            # A fused optimizer wakes every OpenMP thread, however small the model.
            torch.set_num_threads(1)

    def submit(
        self,
        work: Callable[[], Result],
        done: Callable[[Result], Any] | None = None,
        failed: Callable[[Exception], Any] | None = None,
        pauses: bool = False,
    ) -> None:
        """Run `work` after all earlier work, then `done(result)` on the loop.

        If `work` raises, the loop calls `failed(error)`, if given. The error is TensorsBroken if the work did not run.
        With `pauses`, later work waits for `go_on`.
        """
        item = _Work(work, done, failed, pauses)
        self._num_pending += 1
        if self.is_paused or self._queue:
            self._queue.append(item)
        else:
            self.is_paused = pauses
            self._begin(item)

    def go_on(self, work: Callable[[], Result], done: Callable[[Result], Any]) -> None:
        """Run `work` next, then the work that waited."""
        self._num_pending += 1
        self.is_paused = False
        self._queue.appendleft(_Work(work, done, None))
        self._begin_queued()

    def _begin_queued(self) -> None:
        while self._queue and not self.is_paused:
            work = self._queue.popleft()
            self.is_paused = work.pauses
            self._begin(work)

    def _execute(self, work: _Work) -> None:
        """Run `work` unless earlier work failed. `_finish` follows on the loop."""
        result, error = None, self._broken if self.is_broken else None
        if error is None:
            began = time.perf_counter()
            try:
                result = work.run()
            except Exception as raised:
                error = raised
                self.is_broken = work.failed is None
                if self.is_broken and isinstance(raised, DivergedError):
                    self._broken = TensorsBroken(raised.message, fix=raised.fix, reason=raised.reason)
            self.busy_s += time.perf_counter() - began
        if self._executor is None:
            self._finish(work, result, error)
        else:
            self._loop.call_soon_threadsafe(self._finish, work, result, error)

    def _finish(self, work: _Work, result: Any, error: Exception | None) -> None:
        self._num_pending -= 1
        if error is None:
            if work.done is not None:
                work.done(result)
        elif work.failed is not None:
            work.failed(error)
        elif not isinstance(error, TensorsBroken):
            self._on_error(error)
        if self.is_broken and self.is_paused:
            self.is_paused = False
            self._begin_queued()

    def then(self, callback: Callable[[], Any]) -> None:
        """Call `callback` on the loop after all earlier work, even if it failed."""
        if self._num_pending == 0 and not self.is_paused:
            callback()
        else:
            self.submit(lambda: None, lambda _: callback(), lambda _: callback())

    def notify(self, callback: Callable[[], Any]) -> None:
        """From inside work: call `callback` on the loop."""
        if self._executor is None:
            callback()
        else:
            self._loop.call_soon_threadsafe(callback)

    def run(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run `work` after all earlier work, and return its future result. An exception goes only to the awaiter."""
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.submit(
            work,
            lambda result: None if outcome.done() else outcome.set_result(result),
            lambda error: None if outcome.done() else outcome.set_exception(error),
        )
        return outcome

    def close(self) -> None:
        """Wait for all work, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
