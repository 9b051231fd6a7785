"""The live ranks by their number of contributions, with the slowest at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)

_SPARE = 64  # unused numbers that may stay in the heap, beyond as many as are in use


@dataclass
class Standing(Generic[Number]):
    """Ranks by number. An event takes the time of a heap operation: the logarithm of the different numbers."""

    least: Number | None = None
    number_of: dict[int, Number] = field(default_factory=dict)  # by rank
    _ranks: dict[Number, dict[int, None]] = field(default_factory=dict)  # by number, in the order they came to it
    _numbers: list[Number] = field(default_factory=list)  # a heap of those, and of some without ranks

    def put(self, rank: int, number: Number) -> None:
        """Place the rank at `number`, also when it was at another before."""
        before = self.number_of.get(rank)
        if number == before:
            return
        self.number_of[rank] = number
        if (ranks := self._ranks.get(number)) is not None:
            ranks[rank] = None
        else:
            self._open(rank, number)
        if before is not None:
            self._leave(rank, before)

    def remove(self, rank: int) -> None:
        if (number := self.number_of.pop(rank, None)) is not None:
            self._leave(rank, number)

    def _open(self, rank: int, number: Number) -> None:
        """Place the first rank at a number."""
        self._ranks[number] = {rank: None}
        if len(self._numbers) > 2 * len(self._ranks) + _SPARE:
            self._numbers = list(self._ranks)
            heapify(self._numbers)
        else:
            heappush(self._numbers, number)
        if self.least is None or number < self.least:
            self.least = number

    def _leave(self, rank: int, number: Number) -> None:
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
        """The greatest number; looks through all different ones."""
        return max(self._ranks, default=None)

    def first(self, most: int) -> list[int]:
        """Returns so many ranks at the least numbers; looks through all different ones."""
        found = list[int]()
        for number in nsmallest(most, self._ranks):
            found += islice(self._ranks[number], most - len(found))
        return found

    @property
    def slowest_ranks(self) -> dict[int, None]:
        """Ranks at the least number."""
        return {} if self.least is None else self._ranks[self.least]
