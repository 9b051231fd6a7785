"""Ranks in the order of a number, such as their contributions. The least number is always known."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)

_MAX_UNUSED = 64  # numbers without ranks that may stay in the heap, beyond as many as have ranks


@dataclass
class Standing(Generic[Number]):
    """Ranks by number. `put` and `remove` take O(log n), where n is how many different numbers there are."""

    least: Number | None = None
    number_of: dict[int, Number] = field(default_factory=dict)  # by rank
    _ranks: dict[Number, dict[int, None]] = field(default_factory=dict)  # by number, in the order of `put`
    _numbers: list[Number] = field(default_factory=list)  # a heap of these numbers, and of some without ranks

    def put(self, rank: int, number: Number) -> None:
        """Set the number of a rank, which may have another number."""
        before = self.number_of.get(rank)
        if number == before:
            return
        self.number_of[rank] = number
        if (ranks := self._ranks.get(number)) is not None:
            ranks[rank] = None
        else:
            self._add_number(rank, number)
        if before is not None:
            self._take_out(rank, before)

    def remove(self, rank: int) -> None:
        if (number := self.number_of.pop(rank, None)) is not None:
            self._take_out(rank, number)

    def _add_number(self, rank: int, number: Number) -> None:
        """Set the number of a rank, if no other rank has this number."""
        self._ranks[number] = {rank: None}
        if len(self._numbers) > 2 * len(self._ranks) + _MAX_UNUSED:
            self._numbers = list(self._ranks)
            heapify(self._numbers)
        else:
            heappush(self._numbers, number)
        if self.least is None or number < self.least:
            self.least = number

    def _take_out(self, rank: int, number: Number) -> None:
        ranks = self._ranks[number]
        del ranks[rank]
        if ranks:
            return
        del self._ranks[number]
        if number == self.least:
            while self._numbers and self._numbers[0] not in self._ranks:
                heappop(self._numbers)
            self.least = self._numbers[0] if self._numbers else None

    @property
    def most(self) -> Number | None:
        """The greatest number. Takes O(n)."""
        return max(self._ranks, default=None)

    def count(self, number: Number) -> int:
        """Returns how many ranks have this number."""
        return len(self._ranks.get(number, ()))

    def first(self, most: int) -> list[int]:
        """Returns at most `most` ranks, those with the least numbers. Reads all n numbers."""
        found = list[int]()
        for number in nsmallest(most, self._ranks):
            found += islice(self._ranks[number], most - len(found))
        return found

    @property
    def slowest_ranks(self) -> dict[int, None]:
        """The ranks with the least number."""
        return {} if self.least is None else self._ranks[self.least]
