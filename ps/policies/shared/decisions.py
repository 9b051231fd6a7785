"""The decisions of a policy, the settings of every mode, and its live and waiting workers in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ....common.wire.records import Outcome


@dataclass(frozen=True)
class Outer:
    """The outer optimizer: the server runs it along the workers' deltas, and workers keep their own."""

    name: str  # in torch.optim
    arguments: Mapping[str, float | bool]
    reason: str  # for these numbers, as a phrase


@dataclass(slots=True)
class Fold:
    """Add the contribution of `rank` to the open mean, with this weight. If it waited, it counts now."""

    rank: int
    weight: float


@dataclass(slots=True)
class Discard:
    """Drop the staged contribution of `rank`: it does not count."""

    rank: int


@dataclass(slots=True)
class Wait:
    """Decide later, by Fold or Discard, whether the staged contribution of `rank` counts."""

    rank: int


@dataclass(slots=True)
class Commit:
    """Make the mean of the folded contributions the next version. `ranks` names a rank once for each contribution.

    `lr_scale` multiplies the learning rate. It is for gradients only: a mean of weights has no rate.
    """

    ranks: tuple[int, ...]
    reason: str
    lr_scale: float = 1.0
    momentum_among: int = 1  # workers that reduce the optimizer's momentum (`momentum_left`)
    numbers: Mapping[str, float] | None = None  # of the outer optimizer (`Outer`), for this step alone


@dataclass(slots=True)
class Reply:
    """Let `rank` continue with the newest weights."""

    rank: int
    outcome: Outcome


@dataclass(slots=True)
class Refuse:
    """End this worker's call: `kind` is a Reason of the proto."""

    rank: int
    kind: Literal["NOT_JOINED", "SEQ_GAP", "BAD_REQUEST", "OPTIMIZER_UNSUPPORTED"]
    reason: str


Decision = Fold | Discard | Wait | Commit | Reply | Refuse


# ---- members -------------------------------------------------------------------------------------
# The settings of every mode, the live workers, those that wait for a reply, and their spelling.


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


# ---- standing ------------------------------------------------------------------------------------
# Ranks in the order of a number that the caller keeps, such as their training steps. The least is always known.


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
