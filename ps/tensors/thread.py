"""Tensor work in order on one thread, beside an event loop that decides.

torch releases the GIL in its kernels, so the loop goes on serving while a commit runs. For small
models a hop to another thread costs more than the work: there everything runs at once, inline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

# Below this size of a contribution the work takes less time than the hop (about 60 us there and back).
INLINE_BYTES = 256 << 10


class TensorThread:
    """`submit` work and `then` callbacks run in the order they were given.

    `on_error` is called on the loop with the exception of failed work: a bug, since all
    contributions were checked before.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._executor: ThreadPoolExecutor | None = None
        self._num_pending = 0

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

    def submit(self, work: Callable[[], Result], done: Callable[[Result], Any] | None = None) -> None:
        """Run `work` after all earlier work, then `done(result)` on the loop."""
        if self._executor is None:
            try:
                result = work()
            except Exception as error:
                self._on_error(error)
                return
            if done is not None:
                done(result)
            return
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        future = self._executor.submit(work)
        future.add_done_callback(lambda f: loop.call_soon_threadsafe(self._finish, f, done))

    def then(self, callback: Callable[[], Any]) -> None:
        """Call `callback` on the loop after all work given before."""
        if self._num_pending == 0:
            callback()
        else:
            self.submit(lambda: None, lambda _: callback())

    def notify(self, callback: Callable[[], Any]) -> None:
        """From inside work: call `callback` on the loop."""
        if self._executor is None:
            callback()
        else:
            self._loop.call_soon_threadsafe(callback)

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, run after all earlier work."""
        if self._executor is None:
            return work()
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.submit(work, lambda result: None if done.done() else done.set_result(result))
        return await done

    def _finish(self, future: Future[Result], done: Callable[[Result], Any] | None) -> None:
        self._num_pending -= 1
        error = future.exception()
        if error is not None:
            self._on_error(error)
        elif done is not None:
            done(future.result())

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
