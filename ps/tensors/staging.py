"""Memory for uploads: a bounded number of bodies, lent in the order in which they are folded.

Bodies are kept and lent again: touching 100 MB of new memory costs more than filling it. Who finds none free waits,
and its bytes wait in HTTP/2 flow control, on the sender's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from ...common.tensors.layout import as_bytes, new_body

Body = torch.Tensor  # uint8 [num_bytes]


class StagingPool:
    """Lends up to `limit` bodies of `num_bytes`, to the waiter with the lowest position first.

    A position is how many contributions are folded before the waiter's. Only positions below `limit` are served: then
    whoever is folded next always finds a body, however the others come.
    """

    def __init__(self, limit: int, num_bytes: int) -> None:
        self.limit = limit
        self.num_bytes = num_bytes
        self.num_lent = 0
        self._free: list[Body] = []
        self._bytes: dict[int, memoryview] = {}  # by id, of the bodies of this pool, which it keeps for ever
        self._waiters: list[tuple[Callable[[], int], asyncio.Future[Body]]] = []

    @property
    def num_waiting(self) -> int:
        """Uploads that wait for a body."""
        return len(self._waiters)

    def make_room(self, num_workers: int) -> None:
        """With several shards: each worker may have an upload here. Two shards that hold some workers' each, and wait
        for those the other one holds, would wait for ever."""
        self.limit = max(self.limit, num_workers)
        self.look_again()

    def try_borrow(self, position: Callable[[], int]) -> Body | None:
        """A body if one can be had at once."""
        if self.num_lent >= self.limit or position() >= self.limit:
            return None
        self.num_lent += 1
        if not self._free:
            body = new_body(self.num_bytes)
            self._bytes[id(body)] = as_bytes(body)
            return body
        return self._free.pop()

    async def borrow(self, position: Callable[[], int]) -> Body:
        """A body, uint8 [num_bytes] with old contents, as soon as `position()` is served."""
        body = self.try_borrow(position)
        if body is not None:
            return body
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._waiters.append((position, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(future.result())
            raise
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]

    def look_again(self) -> None:
        """Serve waiters whose position has become low enough; call when positions change."""
        if not self._waiters:
            return
        waiting = [waiter for waiter in self._waiters if not waiter[1].done()]
        for position, future in sorted(waiting, key=lambda waiter: waiter[0]()):
            body = self.try_borrow(position)
            if body is None:
                return
            future.set_result(body)

    def bytes_of(self, body: Body) -> memoryview:
        """The memory of a lent body."""
        return self._bytes[id(body)]

    def is_own(self, body: Body) -> bool:
        return id(body) in self._bytes

    def give_back(self, body: Body) -> None:
        """Return a body. One that is not of this pool, a worker's own segment, is nothing to the pool."""
        self.reclaim([body])
        self.donate(body)

    def donate(self, body: Body) -> None:
        """A lent body leaves the pool for a while: it has become the mean of a round."""
        if self.is_own(body):
            self.num_lent -= 1
            self.look_again()

    def reclaim(self, bodies: list[Body]) -> None:
        """Donated bodies return."""
        self._free += filter(self.is_own, bodies)
