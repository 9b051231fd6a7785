"""A link that many transfers share: max-min fair, each no faster than its own end allows. Pure.

A fluid model: bytes flow at rates that change only when a transfer begins or ends. Transfers with the same limit have
the same rate, so that one number, the bytes that each of them has been given so far, stands for all of them, and a
heap by the number at which each ends says who is next: O(log N) for each beginning and end, and as much again for each
different limit.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Key = TypeVar("Key")


class _Class(Generic[Key]):
    """Transfers with one limit."""

    __slots__ = ("given", "heap", "limit", "rate")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.given = 0.0  # bytes, to each that has been here all the time
        self.rate = 0.0
        self.heap: list[tuple[float, int, Key]] = []


class Link(Generic[Key]):
    """Of `capacity` bytes per second. Times must not go back."""

    def __init__(self, capacity: float = math.inf) -> None:
        self.capacity = capacity
        self._only: _Class[Key] | None = None  # where all have one limit
        self.next_end = math.inf  # when the next transfer ends, as things are
        self._classes: dict[float, _Class[Key]] = {}
        self._at = 0.0
        self._num_begun = self._num = 0  # ever, and now

    @property
    def is_unlimited(self) -> bool:
        """Nobody who sends here makes others slower."""
        return math.isinf(self.capacity)

    def begin(self, now: float, key: Key, num_bytes: float, limit: float) -> None:
        """A transfer that is not free begins; it goes no faster than `limit`."""
        found = self._only
        if found is not None and found.limit == limit:
            found.given = found.given + found.rate * (now - self._at) if found.heap else 0.0
            self._at = now
            self._num_begun += 1
            self._num += 1
            heapq.heappush(found.heap, (found.given + num_bytes, self._num_begun, key))
            self._share()
            return
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
        """The transfer that ends at `next_end`."""
        first = self._only
        if first is not None:  # all that has been given on the way is what it ends with
            self._at = self.next_end
        else:
            first = min((class_ for class_ in self._classes.values() if class_.heap), key=self._end_of)
            self._advance(self.next_end)
        first.given, _, key = heapq.heappop(first.heap)
        self._num -= 1
        self._share()
        return key

    def _advance(self, now: float) -> None:
        elapsed_s, self._at = now - self._at, now
        if (only := self._only) is not None:
            if only.heap:
                only.given += only.rate * elapsed_s
        elif elapsed_s:
            for class_ in self._classes.values():
                if class_.heap:
                    class_.given += class_.rate * elapsed_s

    def _end_of(self, item: _Class[Key]) -> float:
        left = item.heap[0][0] - item.given
        return self._at + left / item.rate if left > 0 else self._at

    def _share(self) -> None:
        """Who cannot use an equal part leaves the rest to the others."""
        if (only := self._only) is not None:
            if not self._num:
                self.next_end = math.inf
                return
            part, left = self.capacity / self._num, only.heap[0][0] - only.given
            only.rate = rate = only.limit if only.limit < part else part
            self.next_end = self._at + left / rate if left > 0 else self._at
            return
        busy = [class_ for class_ in self._classes.values() if class_.heap]
        if len(busy) > 1:
            busy.sort(key=lambda class_: class_.limit)
        left, num = self.capacity, self._num
        self.next_end = math.inf
        for item in busy:
            part, size = left / num, len(item.heap)
            item.rate = rate = item.limit if item.limit < part else part
            left, num = left - rate * size, num - size
            if (end := self._end_of(item)) < self.next_end:
                self.next_end = end
