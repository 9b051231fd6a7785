"""Ranks in the order of a number that the caller keeps, such as their training steps. The least is always known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)

_MAX_UNUSED = 64  # numbers without ranks that may stay in the heap, beyond as many as have ranks


@dataclass
class Standing(Generic[Number]):
    """Ranks by number. A change takes O(log n), where n is how many different numbers there are."""

    least: Number | None = None
    _ranks: dict[Number, dict[int, None]] = field(default_factory=dict)  # by number, in the order of `add`
    _numbers: list[Number] = field(default_factory=list)  # a heap of these numbers, and of some without ranks

    def add(self, rank: int, number: Number) -> None:
        """Put a rank at its number."""
        if (ranks := self._ranks.get(number)) is not None:
            ranks[rank] = None
            return
        self._ranks[number] = {rank: None}
        if len(self._numbers) > 2 * len(self._ranks) + _MAX_UNUSED:
            self._numbers = list(self._ranks)
            heapify(self._numbers)
        else:
            heappush(self._numbers, number)
        if self.least is None or number < self.least:
            self.least = number

    def put(self, numbers: Mapping[int, Number]) -> None:
        """Put all ranks at these numbers. Takes O(n)."""
        self._ranks = {}
        for rank, number in numbers.items():
            self._ranks.setdefault(number, {})[rank] = None
        self._numbers = sorted(self._ranks)
        self.least = self._numbers[0] if self._numbers else None

    def move(self, rank: int, before: Number, number: Number) -> None:
        """Move a rank from its number to another one."""
        if number != before:
            self.add(rank, number)
            self.remove(rank, before)

    def remove(self, rank: int, number: Number) -> None:
        """Take out a rank that is at this number."""
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

    @property
    def slowest_ranks(self) -> dict[int, None]:
        """The ranks with the least number."""
        return {} if self.least is None else self._ranks[self.least]
