"""Which live ranks are at which number, and which is the slowest: without looking through all of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Standing:
    """Ranks by number. `add` and `advance` take the same time however many there are."""

    least: int | None = None
    _ranks: dict[int, dict[int, None]] = field(default_factory=dict)  # by number, in the order they came to it

    def add(self, rank: int, number: int) -> None:
        self._ranks.setdefault(number, {})[rank] = None
        self.least = number if self.least is None else min(self.least, number)

    def remove(self, rank: int, number: int) -> None:
        there = self._ranks[number]
        del there[rank]
        if not there:
            del self._ranks[number]
            if number == self.least:
                self.least = number + 1 if number + 1 in self._ranks else min(self._ranks, default=None)

    def advance(self, rank: int, number: int) -> None:
        """The rank goes from `number` to the next."""
        self.add(rank, number + 1)
        self.remove(rank, number)

    @property
    def slowest_ranks(self) -> dict[int, None]:
        """Ranks at the least number."""
        return {} if self.least is None else self._ranks[self.least]
