"""Who waits for a reply, and whose gate is to be asked when: nobody is asked again before it can have opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple


class Closed(NamedTuple):
    """A gate that opens when the mode's progress (`Policy._progress`) has come to `until`; `why` is for people."""

    until: int
    why: Callable[[], str]


@dataclass
class Waiting:
    """Ranks with a reply pending that would reach them."""

    ranks: set[int] = field(default_factory=set)
    _to_ask: set[int] = field(default_factory=set)  # whose gate is asked after this event, or this hold
    _until: dict[int, set[int]] = field(default_factory=dict)  # who is asked again when progress has come there;
    _bounds: list[int] = field(default_factory=list)  # a heap of those. Some may have been replied, or have left

    def add(self, rank: int) -> None:
        self.ranks.add(rank)
        self._to_ask.add(rank)

    def remove(self, rank: int) -> None:
        self.ranks.discard(rank)
        self._to_ask.discard(rank)

    def ask_all(self) -> None:
        self._to_ask |= self.ranks

    def due(self, progress: int) -> list[int]:
        """Ranks whose gate may be open now, ascending; those of which it is not are `shut` again."""
        candidates = self._to_ask
        while self._bounds and self._bounds[0] <= progress:
            candidates |= self._until.pop(heappop(self._bounds)) & self.ranks
        if len(candidates) == 1:  # as nearly always
            return [candidates.pop()]
        found = sorted(candidates)
        candidates.clear()
        return found

    def shut(self, rank: int, until: int | None) -> None:
        """It is asked again when progress has come to `until`; None: after the next event."""
        if until is None:
            self._to_ask.add(rank)
        elif (ranks := self._until.get(until)) is not None:
            ranks.add(rank)
        else:
            self._until[until] = {rank}
            heappush(self._bounds, until)
