"""The settings of every mode, the live workers, those that wait for a reply, and their spelling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Literal, NamedTuple

from ....common.wire.records import Outcome

_NUM_NAMED = 8  # ranks in a sentence


@dataclass(frozen=True)
class Common:
    """Settings of the run that every mode gets."""

    training_steps: int | None = 1_000_000  # of each worker; None: until its own loop ends
    num_workers: int | None = None  # training starts when all of them have joined
    min_workers: int = 1  # with fewer, training holds
    max_staged: int | None = None  # uploads in memory at once; None: one of each worker
    weighting: Literal["samples", "equal"] = "samples"
    delayed_update: bool = False  # workers compute their next contribution while an exchange is in flight
    rounds: bool = False  # the run has a codec: encoded weights would lose small steps
    keeps_most: bool = False  # the contributions' codec sends most of a delta later; outer momentum would sum it up


@dataclass(slots=True)
class Member:
    """A live worker."""

    rank: int
    pending: Outcome | None = None  # the outcome of its pending reply; None: it computes
    is_away: bool = False  # its connection is lost: the pending reply waits until it asks again
    is_fresh: bool = True  # nothing contributed since it was let in


class Closed(NamedTuple):
    """A gate that opens when the mode's progress (`Policy._progress`) reaches `until`; `why` is for people."""

    until: int
    why: Callable[[], str]


@dataclass
class Waiting:
    """Connected ranks with a pending reply."""

    ranks: set[int] = field(default_factory=set)
    to_ask: set[int] = field(default_factory=set)  # ranks whose gate is checked after this event, or this hold
    _until: dict[int, set[int]] = field(default_factory=dict)  # ranks by the progress at which they are checked
    _bounds: list[int] = field(default_factory=list)  # a heap of those numbers; some ranks may have left

    def remove(self, rank: int) -> None:
        self.ranks.discard(rank)
        self.to_ask.discard(rank)

    def ask_all(self) -> None:
        self.to_ask |= self.ranks

    def due(self, progress: int) -> list[int]:
        """Returns the ranks whose gate may be open now, ascending. The caller `shut`s those whose gate is closed."""
        candidates, self.to_ask = self.to_ask, set()
        while self._bounds and self._bounds[0] <= progress:
            candidates |= self._until.pop(heappop(self._bounds)) & self.ranks
        return sorted(candidates)

    def shut(self, rank: int, until: int | None) -> None:
        """Check the rank's gate again when progress reaches `until`; None: after the next event."""
        if until is None:
            self.to_ask.add(rank)
        elif (ranks := self._until.get(until)) is not None:
            ranks.add(rank)
        else:
            self._until[until] = {rank}
            heappush(self._bounds, until)


def names(ranks: Any) -> str:
    """Returns the ranks in a sentence; of many the first few."""
    first = list(islice(ranks, _NUM_NAMED + 1))
    return ", ".join(map(str, first[:_NUM_NAMED])) + (", ..." if len(first) > _NUM_NAMED else "")


def plain(value: Any) -> Any:
    """Returns a dataclass or a set of a policy's state for JSON: sets are sorted."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
