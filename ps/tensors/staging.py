"""The staging pool: memory for a bounded number of uploads, lent in the order in which they will be folded.

The pool reuses payloads, because the first touch of 100 MB of new memory costs more than writing it. If no payload is
free, an upload waits, and HTTP/2 flow control holds its bytes on the sender's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from ...common.tensors.layout import as_bytes, new_payload

Payload = torch.Tensor  # uint8 [num_bytes]


class StagingPool:
    """Lends up to `limit` payloads of `num_bytes`, to the waiter with the lowest position first.

    A position is the number of contributions that are folded before the waiter's. The pool serves only positions below
    `limit`, so the contribution that is folded next always gets a payload.
    """

    def __init__(self, limit: int, num_bytes: int) -> None:
        self.limit = limit
        self.num_bytes = num_bytes
        self.num_lent = 0
        self._free: list[Payload] = []
        self._bytes: dict[int, memoryview] = {}  # by id of each payload of this pool, which it never frees
        self.waiters: list[tuple[Callable[[], int], asyncio.Future[Payload]]] = []  # uploads without memory

    @property
    def num_waiting(self) -> int:
        """The number of uploads that wait for a payload."""
        return len(self.waiters)

    def make_room(self, num_uploads: int) -> None:
        """Raise the limit to `num_uploads`, for several shards.

        Otherwise two shards could each have uploads of different workers, and wait for the other's forever.
        """
        self.limit = max(self.limit, num_uploads)
        self.look_again()

    def try_borrow(self, position: int) -> Payload | None:
        """Return a free payload, uint8 [num_bytes] with old contents, or None."""
        if self.num_lent >= self.limit or position >= self.limit:
            return None
        self.num_lent += 1
        if self._free:
            return self._free.pop()
        payload = new_payload(self.num_bytes)
        self._bytes[id(payload)] = as_bytes(payload)
        return payload

    def request(self, position: Callable[[], int]) -> asyncio.Future[Payload]:
        """Return a future payload, served in the order of `position()`. To stop waiting, call `withdraw`."""
        request: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        self.waiters.append((position, request))
        self.look_again()
        return request

    def withdraw(self, request: asyncio.Future[Payload]) -> None:
        """Cancel a request. If it was already served, its payload returns to the pool."""
        self.waiters = [waiter for waiter in self.waiters if waiter[1] is not request]
        if not request.cancel() and not request.cancelled():
            self.give_back(request.result())

    def look_again(self) -> None:
        """Serve waiters whose position has become low enough. Call this when positions change."""
        for waiter in sorted(self.waiters, key=lambda waiter: waiter[0]()):
            position, request = waiter
            if (payload := self.try_borrow(position())) is None:
                return
            self.waiters.remove(waiter)
            request.set_result(payload)

    def bytes_of(self, payload: Payload) -> memoryview:
        """Return the bytes of a lent payload. They share memory."""
        return self._bytes[id(payload)]

    def is_own(self, payload: Payload) -> bool:
        """Whether the payload belongs to this pool."""
        return id(payload) in self._bytes

    def give_back(self, payload: Payload) -> None:
        """Return a payload. The pool ignores a payload that is not its own, such as a worker's segment."""
        self.reclaim([payload])
        self.donate(payload)

    def donate(self, payload: Payload) -> None:
        """Stop counting a payload as lent, because it has become the mean of a round. `reclaim` brings it back."""
        if id(payload) in self._bytes:
            self.num_lent -= 1
            if self.waiters:
                self.look_again()

    def reclaim(self, payloads: list[Payload]) -> None:
        """Return donated payloads to the pool."""
        for payload in payloads:
            if id(payload) in self._bytes:
                self._free.append(payload)
