"""Memory for uploads: a bounded number of payloads, lent in the order in which they are folded.

The pool keeps payloads and lends them again: touching 100 MB of new memory costs more than filling it. An upload that
finds none free waits, and its bytes wait in HTTP/2 flow control, on the sender's side.
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
    the contribution that is folded next always finds a payload.
    """

    def __init__(self, limit: int, num_bytes: int) -> None:
        self.limit = limit
        self.num_bytes = num_bytes
        self.num_lent = 0
        self._free: list[Payload] = []
        self._bytes: dict[int, memoryview] = {}  # by id, of the payloads of this pool, which it never frees
        self._waiters: list[tuple[Callable[[], int], asyncio.Future[Payload]]] = []

    @property
    def num_waiting(self) -> int:
        """Uploads that wait for a payload."""
        return len(self._waiters)

    def make_room(self, num_uploads: int) -> None:
        """Lend at least this many payloads, as several shards need it. Two shards that each hold some workers' uploads,
        and wait for those that the other one holds, would wait for ever."""
        self.limit = max(self.limit, num_uploads)
        self.look_again()

    def try_borrow(self, position: Callable[[], int]) -> Payload | None:
        """A payload, uint8 [num_bytes] with old contents, if one can be had at once."""
        if self.num_lent >= self.limit or position() >= self.limit:
            return None
        self.num_lent += 1
        if self._free:
            return self._free.pop()
        payload = new_payload(self.num_bytes)
        self._bytes[id(payload)] = as_bytes(payload)
        return payload

    def request(self, position: Callable[[], int]) -> asyncio.Future[Payload]:
        """A payload as soon as `position()` is served. A caller that stops waiting calls `withdraw`."""
        request: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        self._waiters.append((position, request))
        self.look_again()
        return request

    def withdraw(self, request: asyncio.Future[Payload]) -> None:
        """Give up a request, also one that was served a moment ago."""
        self._waiters = [waiter for waiter in self._waiters if waiter[1] is not request]
        if not request.cancel() and not request.cancelled():
            self.give_back(request.result())

    def look_again(self) -> None:
        """Serve waiters whose position has become low enough. Call this when positions change."""
        for waiter in sorted(self._waiters, key=lambda waiter: waiter[0]()):
            position, request = waiter
            if (payload := self.try_borrow(position)) is None:
                return
            self._waiters.remove(waiter)
            request.set_result(payload)

    def bytes_of(self, payload: Payload) -> memoryview:
        """The memory of a lent payload."""
        return self._bytes[id(payload)]

    def is_own(self, payload: Payload) -> bool:
        return id(payload) in self._bytes

    def give_back(self, payload: Payload) -> None:
        """Return a payload. The pool ignores a payload that is not its own, such as a worker's segment."""
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
