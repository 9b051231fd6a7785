"""The ranks that wait for a reply, and the events after which their gates are checked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple


class Closed(NamedTuple):
    """A gate that opens when the mode's progress (`Policy._progress`) reaches `until`; `why` is for people."""

    until: int
    why: Callable[[], str]


@dataclass
class Waiting:
    """Connected ranks with a pending reply."""

    ranks: set[int] = field(default_factory=set)
    _to_ask: set[int] = field(default_factory=set)  # ranks whose gate is checked after this event, or this hold
    _until: dict[int, set[int]] = field(default_factory=dict)  # ranks by the progress at which they are checked
    _bounds: list[int] = field(default_factory=list)  # a heap of those numbers; some ranks may have left

    def add(self, rank: int) -> None:
        self.ranks.add(rank)
        self._to_ask.add(rank)

    def remove(self, rank: int) -> None:
        self.ranks.discard(rank)
        self._to_ask.discard(rank)

    def ask_all(self) -> None:
        self._to_ask |= self.ranks

    def due(self, progress: int) -> list[int]:
        """Returns the ranks whose gate may be open now, ascending. The caller `shut`s those whose gate is closed."""
        candidates, self._to_ask = self._to_ask, set()
        while self._bounds and self._bounds[0] <= progress:
            candidates |= self._until.pop(heappop(self._bounds)) & self.ranks
        return sorted(candidates)

    def shut(self, rank: int, until: int | None) -> None:
        """Check the rank's gate again when progress reaches `until`; None: after the next event."""
        if until is None:
            self._to_ask.add(rank)
        elif (ranks := self._until.get(until)) is not None:
            ranks.add(rank)
        else:
            self._until[until] = {rank}
            heappush(self._bounds, until)
