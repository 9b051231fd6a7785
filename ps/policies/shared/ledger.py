"""Counting: versions, contributions and training steps of each rank, and what a snapshot keeps of them.

Contributions have sequence numbers from 1, per rank. A training step is a batch: in localsgd a contribution covers
several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decisions import Commit
from .members import Common, Member
from .standing import Standing
from .traits import Traits

ROUNDS = -1  # a rank's place in `in_step`, where all ranks are counted together


class Ledger(Traits):
    """Who is here, and how far everybody is. Every question takes the same time however many workers there are."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.training_steps = common.training_steps  # where nobody has set them, workers may say them later
        self.version = 0  # commits decided
        self.members: dict[int, Member] = {}
        # Number of each rank's newest contribution that counts. It stays after the rank leaves, which makes a repeated
        # contribution harmless. A rank that is new to a running job begins at the slowest's number.
        self.num_counted: dict[int, int] = {}
        self.out: set[int] = set()  # ranks that take no more training steps, and are not missed
        self.is_stopping = False  # nobody begins another contribution
        self.committed_by: tuple[int, ...] | None = None  # members at the newest commit; None: others since
        # Of a model that is stepped in parts: contributions of each rank's newest training step; of rounds, one count.
        self.in_step: dict[int, int] = {}
        self._num_open: dict[int, int] = {}  # by rank: contributions that count and are in no version yet
        self._ranks: list[int] = []  # of the members, ascending
        self._first_number = 0  # of a rank that is new while nobody is live
        # Training steps of each rank beyond those of its contributions, or of the rounds: taken in another mode.
        self._offsets: dict[int, int] = {}
        self._offset = 0  # of a rank that is new
        self._too_many: dict[int, int] = {}  # by rank: training steps that its open contribution lacks
        self._standing = Standing()  # of the live ranks, by `num_counted`

    def _copy_counts(self, other: Ledger) -> None:
        """Go on where a ledger of a compatible mode stands."""
        self.common, self.training_steps, self.version = other.common, other.training_steps, other.version
        self.members, self.num_counted, self.out = other.members, other.num_counted, other.out
        self.is_stopping, self.committed_by, self.in_step = other.is_stopping, other.committed_by, other.in_step
        self._num_open, self._ranks, self._first_number = other._num_open, other._ranks, other._first_number
        self._offsets, self._offset, self._too_many = other._offsets, other._offset, other._too_many
        self._standing = other._standing

    # ---- questions ------------------------------------------------------------------------

    @property
    def slowest(self) -> int:
        """Number of the newest contribution that counts of the live worker that has the fewest."""
        least = self._standing.least
        return self._first_number if least is None else least

    def slowest_members(self, most: int) -> list[int]:
        """At most so many live ranks, those with the fewest contributions."""
        return self._standing.first(most)

    def lead(self, rank: int) -> int:
        """Contributions of a live worker ahead of the slowest live one."""
        return self.num_counted[rank] - self.slowest

    def next_local_steps(self, rank: int) -> int:
        """Training steps the worker takes before its next contribution; 0 when it is to take no more."""
        if self.is_stopping:
            return 0
        if self.training_steps is None:
            return self.local_steps
        most, left = self.local_steps, self.training_steps - self.steps_done(rank)
        return most if most < left else left

    def assigned_steps(self, rank: int) -> int | None:
        """Training steps that the worker was told for its next contribution, where they differ from rank to rank. None:
        `local_steps`, or as many as were left."""
        return None

    def steps_done(self, rank: int) -> int:
        """Training steps (batches) of the rank that count."""
        most = self.training_steps  # asked thrice at every event: in one go
        steps = self.version if self.has_rounds else self.num_counted.get(rank, 0)  # contributions, or rounds
        steps = steps * self.local_steps + (self._offsets.get(rank, self._offset) if self._offsets else self._offset)
        return steps if most is None or steps < most else most

    @property
    def min_steps_done(self) -> int:
        """Training steps of the slowest live rank; when nobody is live, of the slowest there was. Takes time in
        proportion to the members only for a model in parts."""
        if not self.members or (self.in_step and not self.has_rounds):
            return min(map(self.steps_done, self.members or self.num_counted), default=0)
        rounds = self.version if self.has_rounds else self.slowest
        steps = self._offset + rounds * self.local_steps
        return steps if self.training_steps is None else min(self.training_steps, steps)

    def in_step_of(self, rank: int) -> int:
        """Contributions that count of the rank's newest training step, where a step has several (a model in parts)."""
        return self.in_step.get(ROUNDS if self.has_rounds else rank, 0)

    def is_through(self, rank: int) -> bool:
        """It has taken all its training steps. Whether the last one has more parts, only the worker knows."""
        return not (self.next_local_steps(rank) or self.in_step_of(rank))

    # ---- what a snapshot keeps -------------------------------------------------------------

    def committed_of(self, rank: int) -> int:
        """Contributions of the rank that the newest version holds."""
        return self.num_counted.get(rank, 0) - self._num_open.get(rank, 0)

    def num_committed(self) -> dict[int, int]:
        return {rank: self.committed_of(rank) for rank in self.num_counted}

    def committed_steps(self) -> dict[int, int]:
        """Training steps of each rank that the newest version holds."""
        done = {rank: self.steps_done(rank) for rank in self.num_counted}
        if self.has_rounds:
            return done
        return {rank: steps - self._num_open.get(rank, 0) * self.local_steps for rank, steps in done.items()}

    def saved_state(self) -> dict[str, Any]:
        """What else this mode needs to go on from the newest version, as JSON; nothing of what came after it."""
        return {}

    def restore(self, version: int, contributions: Mapping[int, int], state: Mapping[str, Any]) -> None:
        """Go on from a snapshot, with whichever workers join, before any event. `contributions` and `state` are what
        `num_committed` and `saved_state` returned at that version."""
        self.version = version
        self.num_counted = dict(contributions)
        self._first_number = min(contributions.values(), default=0)

    def count_from(self, steps: Mapping[int, int]) -> None:
        """After `restore`: each rank has done these training steps (`committed_steps`), in whatever mode it took them.
        Rounds belong to all, and begin at the slowest of those who take more steps."""
        if not self.num_counted:
            return
        fewest = min(self.num_counted, key=lambda rank: self.num_counted[rank])
        least = min(steps.get(rank, 0) for rank in (self.num_counted.keys() - self.out or self.num_counted))
        if self.has_rounds:
            self._offset = least - self.version * self.local_steps
            return
        for rank in self.num_counted:
            self._offsets[rank] = steps.get(rank, least) - self.num_counted[rank] * self.local_steps
        self._offset = self._offsets[fewest]

    # ---- counting --------------------------------------------------------------------------

    def _count_contribution(self, rank: int) -> None:
        number = self.num_counted[rank]
        self.num_counted[rank] = number + 1
        self._num_open[rank] = self._num_open.get(rank, 0) + 1
        self._standing.move(rank, number, number + 1)

    def _count_part(self, key: int, continues: bool) -> None:
        """A contribution of a part counts, or a round of them. One that continues a training step is none itself."""
        self.in_step[key] = self.in_step.get(key, 0) + 1 if continues else 1
        if not continues:
            return
        if key == ROUNDS:
            self._offset -= self.local_steps
            self._offsets = {rank: offset - self.local_steps for rank, offset in self._offsets.items()}
        else:
            self._offsets[key] = self._offsets.get(key, self._offset) - self.local_steps

    def _commit(self, ranks: tuple[int, ...], reason: str, scales: tuple[float, ...] = ()) -> Commit:
        """Make a version of what these ranks have contributed: all that was folded since the one before."""
        self.version += 1
        if self.committed_by is None:
            self.committed_by = tuple(self._ranks)
        for rank in ranks:
            self._num_open[rank] -= 1
        for rank in self._too_many.keys() & set(ranks) if self._too_many else ():
            self._offsets[rank] = self._offsets.get(rank, self._offset) - self._too_many.pop(rank)
        return Commit(ranks, reason, scales, self._momentum_among())

    def _momentum_among(self) -> int:
        """Workers whose lateness stands for some of the optimizer's momentum (`shared/late.py`); 1: none does."""
        return 1
