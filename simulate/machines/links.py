"""A link that many transfers share with max-min fairness. Each transfer also has its own limit. Pure.

A fluid model: bytes flow at rates that change only when a transfer begins or ends. Transfers with the same limit have
the same rate. So one number, the bytes that each of them has received so far, describes them all. A heap, ordered
by this number at the end of each transfer, gives the next end. A begin or end costs O(log N), plus one step per limit.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(eq=False, slots=True)
class _Class(Generic[Key]):
    """Transfers with one limit."""

    limit: float
    given: float = 0.0  # bytes received by a transfer that was here from the start
    rate: float = 0.0
    heap: list[tuple[float, int, Key]] = field(default_factory=list)


class Link(Generic[Key]):
    """A link of `capacity` bytes per second. Times must not go back."""

    def __init__(self, capacity: float = math.inf) -> None:
        self.capacity = capacity
        self.next_end = math.inf  # when the next transfer ends, at the current rates
        self._classes: dict[float, _Class[Key]] = {}  # by limit
        self._next: _Class[Key]  # limit of the transfer that ends next
        self._only: _Class[Key] | None = None  # where all limits are the same
        self._at = 0.0
        self._num_begun = self._num = 0  # ever, and now

    def begin(self, now: float, key: Key, num_bytes: float, limit: float) -> None:
        """Begin a transfer of `num_bytes` > 0, at most as fast as `limit`."""
        self._advance(now)
        found = self._classes.get(limit)
        if found is None:
            found = self._classes[limit] = _Class(limit)
            self._only = found if len(self._classes) == 1 else None
        elif not found.heap:
            found.given = 0.0  # keep the sums small, and exact
        self._num_begun += 1
        self._num += 1
        heapq.heappush(found.heap, (found.given + num_bytes, self._num_begun, key))
        self._share()

    def end(self) -> Key:
        """End the transfer that is due at `next_end`, and return its key."""
        if self._only is None:
            self._advance(self.next_end)
        else:
            self._at = self.next_end  # the next line says how far its class has come
        self._next.given, _, key = heapq.heappop(self._next.heap)
        self._num -= 1
        self._share()
        return key

    def _advance(self, now: float) -> None:
        elapsed_s = now - self._at
        if elapsed_s:
            self._at = now
            for class_ in self._classes.values():
                if class_.heap:
                    class_.given += class_.rate * elapsed_s

    def _share(self) -> None:
        """Divide the capacity: a transfer that cannot use an equal part leaves the rest to the others."""
        left, num = self.capacity, self._num
        if (class_ := self._only) is not None and num:  # as nearly always; the same numbers as below
            self._next = class_
            part, limit = left / num, class_.limit
            class_.rate = rate = limit if limit < part else part
            remaining = class_.heap[0][0] - class_.given
            self.next_end = self._at + remaining / rate if remaining > 0 else self._at
            return
        self.next_end = math.inf
        busy = [class_ for class_ in self._classes.values() if class_.heap]
        if len(busy) > 1:
            busy.sort(key=lambda class_: class_.limit)
        for class_ in busy:
            part, size = left / num, len(class_.heap)
            class_.rate = rate = class_.limit if class_.limit < part else part
            left, num = left - rate * size, num - size
            remaining = class_.heap[0][0] - class_.given
            end = self._at + remaining / rate if remaining > 0 else self._at
            if end < self.next_end:
                self.next_end, self._next = end, class_
