"""The live ranks by their number of contributions, with the slowest at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice

_SPARE = 64  # unused numbers that may stay in the heap, beyond as many as are in use


@dataclass
class Standing:
    """Ranks by number. An event takes the time of a heap operation: the logarithm of the different numbers."""

    least: int | None = None
    _ranks: dict[int, dict[int, None]] = field(default_factory=dict)  # by number, in the order they came to it
    _numbers: list[int] = field(default_factory=list)  # a heap of those, and of some without ranks

    def add(self, rank: int, number: int) -> None:
        ranks = self._ranks.get(number)
        if ranks is not None:
            ranks[rank] = None
            return
        self._ranks[number] = {rank: None}
        if len(self._numbers) > 2 * len(self._ranks) + _SPARE:
            self._numbers = list(self._ranks)
            heapify(self._numbers)
        else:
            heappush(self._numbers, number)
        if self.least is None or number < self.least:
            self.least = number

    def remove(self, rank: int, number: int) -> None:
        ranks = self._ranks[number]
        del ranks[rank]
        if ranks:
            return
        del self._ranks[number]
        if number == self.least:
            while self._numbers and self._numbers[0] not in self._ranks:
                heappop(self._numbers)
            self.least = self._numbers[0] if self._numbers else None

    def move(self, rank: int, before: int, number: int) -> None:
        """Move the rank from `before` to `number`."""
        if number != before:
            self.add(rank, number)
            self.remove(rank, before)

    @property
    def most(self) -> int | None:
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
