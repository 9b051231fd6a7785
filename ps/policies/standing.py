"""Which live ranks are at which number, and which is the slowest: without looking through all of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

_FEW = 16


@dataclass
class Standing:
    """Ranks by number. `add`, `remove` and `advance` take time in the logarithm of the numbers there are."""

    _ranks: dict[int, dict[int, None]] = field(default_factory=dict)  # by number, in the order they came to it
    _numbers: list[int] = field(default_factory=list)  # a heap of those, and of some at which nobody is any more

    def add(self, rank: int, number: int) -> None:
        if number not in self._ranks:
            self._ranks[number] = {}
            heapq.heappush(self._numbers, number)
        self._ranks[number][rank] = None

    def remove(self, rank: int, number: int) -> None:
        there = self._ranks[number]
        del there[rank]
        if not there:
            del self._ranks[number]
            if len(self._numbers) > 2 * len(self._ranks) + _FEW:  # a slow rank keeps the others' old numbers here
                self._numbers = sorted(self._ranks)
            while self._numbers and self._numbers[0] not in self._ranks:
                heapq.heappop(self._numbers)

    def advance(self, rank: int, number: int) -> None:
        """The rank goes from `number` to the next."""
        self.add(rank, number + 1)
        self.remove(rank, number)

    @property
    def least(self) -> int | None:
        return self._numbers[0] if self._numbers else None

    @property
    def slowest_ranks(self) -> dict[int, None]:
        """Ranks at the least number."""
        return self._ranks[self._numbers[0]] if self._numbers else {}
