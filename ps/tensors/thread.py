"""Tensor work in order on one thread, beside an event loop that decides.

torch releases the GIL in its kernels, so the loop goes on serving while a commit runs. For small models a hop to
another thread costs more than the work: there everything runs at once, inline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ...common.errors import ParamServerError

Result = TypeVar("Result")

# Below this size of a contribution the work takes less time than the hop (about 60 us there and back).
INLINE_BYTES = 256 << 10


class TensorsBroken(ParamServerError):
    """Earlier tensor work failed half way: what the tensors hold is no version, and nothing more is done with them."""


class TensorThread:
    """`submit` work and `then` callbacks run in the order they were given.

    Work is of two kinds. What changes the weights has nobody to reply to: when it fails, `is_broken`, nothing that
    was or is submitted runs any more, and `on_error` is called on the loop, once, with the exception: a bug, since
    all contributions were checked before, or DivergedError, where weights are no longer finite. What only
    reads, or changes a payload that is not taken yet, has somebody
    who is told when it fails (`failed`, or the awaiter of `run`), and all else goes on.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._executor: ThreadPoolExecutor | None = None
        self._num_pending = 0
        self._queue: deque[tuple[Any, Any, Any, bool]] = deque()  # not begun: work, done, failed, whether it holds
        self.is_held = False
        self.is_broken = False
        self.busy_s = 0.0  # that work has taken

    def size_for(self, num_bytes: int) -> None:
        """Choose by the size of a contribution whether work runs inline; call before any work."""
        if num_bytes > INLINE_BYTES:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tensors")
            # Half of the cores: the others receive and send. Few threads also suit windows of 2 MiB.
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
        holds: bool = False,
    ) -> None:
        """Run `work` after all earlier work, then `done(result)` on the loop.

        With `failed` an error is told there and ends nothing; TensorsBroken when the work was not run at all. What
        comes after work that `holds` waits for `go_on`.
        """
        self._num_pending += 1
        if self._executor is None and not (self._queue or self.is_held or holds):
            self._begin(work, done, failed)
            return
        self._queue.append((work, done, failed, holds))
        self._begin_those_that_may()

    def go_on(self, work: Callable[[], Result], done: Callable[[Result], Any]) -> None:
        """`work` comes next, and then what has waited."""
        self._num_pending += 1
        self.is_held = False
        self._begin(work, done, None)
        self._begin_those_that_may()

    def _begin_those_that_may(self) -> None:
        while self._queue and not self.is_held:
            work, done, failed, self.is_held = self._queue.popleft()
            self._begin(work, done, failed)

    def _begin(self, work: Callable[[], Any], done: Any, failed: Any) -> None:
        if self._executor is None:
            self._finish(self._carry_out(work, failed is None), done, failed)
            return
        future = self._executor.submit(self._carry_out, work, failed is None)
        future.add_done_callback(lambda f: self._loop.call_soon_threadsafe(self._finish, f.result(), done, failed))

    def _carry_out(self, work: Callable[[], Result], changes_weights: bool) -> tuple[Result | None, Exception | None]:
        """On the thread: at the moment of a failure, nothing later may run."""
        if self.is_broken:
            return None, TensorsBroken("earlier work on the weights failed half way: they are in no known state")
        began = time.perf_counter()
        try:
            return work(), None
        except Exception as error:
            self.is_broken = changes_weights
            return None, error
        finally:
            self.busy_s += time.perf_counter() - began

    def _finish(self, outcome: tuple[Any, Exception | None], done: Any, failed: Any) -> None:
        self._num_pending -= 1
        result, error = outcome
        if error is None:
            if done is not None:
                done(result)
        elif failed is not None:
            failed(error)
        elif not isinstance(error, TensorsBroken):
            self._on_error(error)
        if self.is_broken and self.is_held:
            self.is_held = False
            self._begin_those_that_may()

    def then(self, callback: Callable[[], Any]) -> None:
        """Call `callback` on the loop after all work given before, whatever came of it."""
        if self._num_pending == 0 and not self.is_held:
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
        """The result of `work`, run after all earlier work; what it raises is the awaiter's, and ends nothing."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.submit(
            work,
            lambda result: None if done.done() else done.set_result(result),
            lambda error: None if done.done() else done.set_exception(error),
        )
        return done

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
