"""Memory for uploads: a bounded number of payloads, lent in the order in which they are folded.

Payloads are kept and lent again: touching 100 MB of new memory costs more than filling it. Who finds none free waits,
and its bytes wait in HTTP/2 flow control, on the sender's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from ...common.tensors.layout import as_bytes, new_payload

Payload = torch.Tensor  # uint8 [num_bytes]


class StagingPool:
    """Lends up to `limit` payloads of `num_bytes`, to the waiter with the lowest position first.

    A position is how many contributions are folded before the waiter's. Only positions below `limit` are served: then
    whoever is folded next always finds a payload, however the others come.
    """

    def __init__(self, limit: int, num_bytes: int) -> None:
        self.limit = limit
        self.num_bytes = num_bytes
        self.num_lent = 0
        self._free: list[Payload] = []
        self._bytes: dict[int, memoryview] = {}  # by id, of the payloads of this pool, which it keeps for ever
        self._waiters: list[tuple[Callable[[], int], asyncio.Future[Payload]]] = []

    @property
    def num_waiting(self) -> int:
        """Uploads that wait for a payload."""
        return len(self._waiters)

    def make_room(self, num_workers: int) -> None:
        """With several shards: each worker may have an upload here. Two shards that hold some workers' each, and wait
        for those the other one holds, would wait for ever."""
        self.limit = max(self.limit, num_workers)
        self.look_again()

    def try_borrow(self, position: Callable[[], int]) -> Payload | None:
        """A payload if one can be had at once."""
        if self.num_lent >= self.limit or position() >= self.limit:
            return None
        self.num_lent += 1
        if not self._free:
            payload = new_payload(self.num_bytes)
            self._bytes[id(payload)] = as_bytes(payload)
            return payload
        return self._free.pop()

    async def borrow(self, position: Callable[[], int]) -> Payload:
        """A payload, uint8 [num_bytes] with old contents, as soon as `position()` is served."""
        payload = self.try_borrow(position)
        if payload is not None:
            return payload
        future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
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
            payload = self.try_borrow(position)
            if payload is None:
                return
            future.set_result(payload)

    def bytes_of(self, payload: Payload) -> memoryview:
        """The memory of a lent payload."""
        return self._bytes[id(payload)]

    def is_own(self, payload: Payload) -> bool:
        return id(payload) in self._bytes

    def give_back(self, payload: Payload) -> None:
        """Return a payload. One that is not of this pool, a worker's own segment, is nothing to the pool."""
        self.reclaim([payload])
        self.donate(payload)

    def donate(self, payload: Payload) -> None:
        """A lent payload leaves the pool for a while: it has become the mean of a round."""
        if self.is_own(payload):
            self.num_lent -= 1
            self.look_again()

    def reclaim(self, payloads: list[Payload]) -> None:
        """Donated payloads return."""
        self._free += filter(self.is_own, payloads)
