"""Counts versions, and contributions and training steps of each rank, for the policy and its snapshots.

Contributions have sequence numbers from 1, per rank. A training step is one `step()` of a rank. In localsgd a
contribution covers several training steps. If a script steps a model in parts, a training step has several
contributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decisions import Commit
from .members import Common, Member
from .standing import Standing
from .traits import Traits

ROUNDS = -1  # key of `in_step` in modes with rounds, where one count is for all ranks


class Ledger(Traits):
    """The members and their progress. `slowest`, `lead` and `steps_done` take constant time."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.training_steps = common.training_steps  # without a configured number workers may announce it later
        self.version = 0  # commits decided
        self.members: dict[int, Member] = {}
        # By rank: sequence number of the newest contribution that counts. It stays after the rank leaves, so that a
        # repeated contribution is recognized. A new rank in a running job begins at the slowest rank's number.
        self.num_counted: dict[int, int] = {}
        self.finished_ranks: set[int] = set()  # no worker waits for them
        self.is_stopping = False  # no worker begins another contribution
        self.committed_by: tuple[int, ...] | None = None  # members at the newest commit; None: they have changed
        # Only for a model that is stepped in parts. By rank: contributions that count in its newest training step. In
        # modes with rounds, the only key is ROUNDS, and the value counts rounds.
        self.in_step: dict[int, int] = {}
        self._num_uncommitted: dict[int, int] = {}  # by rank: contributions that count, but are not in a version yet
        self._ranks: list[int] = []  # of the members, ascending
        self._start_number = 0  # the `num_counted` with which a new rank begins if no rank is live
        # By rank: training steps = contributions (or rounds) times `local_steps`, plus this. It is not 0 after a change
        # of mode, after short contributions, and for a model that is stepped in parts.
        self._offsets: dict[int, int] = {}
        self._default_offset = 0  # the same for ranks without an entry in `_offsets`
        # By rank, added to its number when it is compared with another rank's; 0 without an entry. After a resume from
        # a mode with rounds, ranks with equal training steps may have different numbers.
        self.shifts: dict[int, int] = {}
        # By rank: training steps that its uncommitted contribution has fewer than `local_steps`. The commit subtracts
        # them from the offset.
        self._missing_steps: dict[int, int] = {}
        self._standing = Standing[int]()  # the live ranks, ordered by `num_counted` plus `shifts`

    # ---- questions ------------------------------------------------------------------------

    @property
    def slowest(self) -> int:
        """The lowest `num_counted` of the live workers. If none is live, the number with which a new rank begins."""
        least = self._standing.least
        return self._start_number if least is None else least

    def slowest_members(self, most: int) -> list[int]:
        """Returns the `most` live ranks with the fewest contributions."""
        return self._standing.first(most)

    def lead(self, rank: int) -> int:
        """Returns how many contributions a live worker is ahead of the slowest live worker."""
        return self._standing.number_of[rank] - self.slowest

    def next_local_steps(self, rank: int) -> int:
        """Returns the training steps that the worker's next contribution covers, or 0 if it takes no more steps."""
        if self.is_stopping:
            return 0
        if self.training_steps is None:
            return self.local_steps
        most, left = self.local_steps, self.training_steps - self.steps_done(rank)
        return most if most < left else left

    def assigned_steps(self, rank: int) -> int | None:
        """Returns the steps that a reply assigned to the worker's next contribution, where ranks differ. None:
        `local_steps`, or as many as were left."""
        return None

    def steps_done(self, rank: int) -> int:
        """Returns the training steps (batches) of the rank that count."""
        most = self.training_steps  # a hot path, three times for every event: no method calls
        steps = self.version if self.has_rounds else self.num_counted.get(rank, 0)  # contributions, or rounds
        steps = steps * self.local_steps + self._offsets.get(rank, self._default_offset)
        return steps if most is None or steps < most else most

    @property
    def min_steps_done(self) -> int:
        """Training steps of the slowest live rank. If none is live, those of the slowest known rank.

        Takes time in proportion to the ranks if none is live, or if a model is stepped in parts without rounds.
        """
        if not self.members or (self.in_step and not self.has_rounds):
            return min(map(self.steps_done, self.members or self.num_counted), default=0)
        rounds = self.version if self.has_rounds else self.slowest
        steps = self._default_offset + rounds * self.local_steps
        return steps if self.training_steps is None else min(self.training_steps, steps)

    @property
    def num_active(self) -> int:
        """Live workers that have training steps to take. Those that step a model in parts all count."""
        if self.training_steps is None or self.has_rounds or self.local_steps > 1 or self.in_step:
            return len(self.members)
        return len(self.members) - self._standing.count(self.training_steps - self._default_offset)

    def in_step_of(self, rank: int) -> int:
        """Returns how many contributions count in the rank's newest training step; 0 for a model without parts."""
        return self.in_step.get(ROUNDS if self.has_rounds else rank, 0)

    def is_through(self, rank: int) -> bool:
        """Whether the rank has taken all its training steps. Only the worker knows whether the last has more parts."""
        return not (self.next_local_steps(rank) or self.in_step_of(rank))

    # ---- what a snapshot keeps -------------------------------------------------------------

    def committed_of(self, rank: int) -> int:
        """Returns the sequence number of the rank's newest contribution that is in a version."""
        return self.num_counted.get(rank, 0) - self._num_uncommitted.get(rank, 0)

    def num_committed(self) -> dict[int, int]:
        return {rank: self.committed_of(rank) for rank in self.num_counted}

    def committed_steps(self) -> dict[int, int]:
        """Returns the training steps of each rank that are in the newest version."""
        done = {rank: self.steps_done(rank) for rank in self.num_counted}
        if self.has_rounds:
            return done
        return {rank: steps - self._num_uncommitted.get(rank, 0) * self.local_steps for rank, steps in done.items()}

    def saved_state(self) -> dict[str, Any]:
        """Returns the mode's other state at the newest version, as JSON, without anything that came after it."""
        return {}

    def restore(self, version: int, contributions: Mapping[int, int], state: Mapping[str, Any]) -> None:
        """Continue from a snapshot, before any event. `contributions` and `state` are what `num_committed` and
        `saved_state` returned at that version. Any workers may join."""
        self.version = version
        self.num_counted = dict(contributions)
        self._start_number = min(contributions.values(), default=0)

    def count_from(self, steps: Mapping[int, int]) -> None:
        """Set the training steps of each rank (`committed_steps`) after `restore`, in whichever mode it took them.
        In modes with rounds all ranks share one count, which begins at the slowest unfinished rank's."""
        if not self.num_counted:
            return
        unfinished = self.num_counted.keys() - self.finished_ranks
        least = min(steps.get(rank, 0) for rank in unfinished or self.num_counted)
        if self.has_rounds:
            self._default_offset = least - self.version * self.local_steps
            return
        counted = self.num_counted
        self._offsets = {rank: steps.get(rank, least) - counted[rank] * self.local_steps for rank in counted}
        self._default_offset = self._offsets[min(counted, key=counted.__getitem__)]
        if not self.in_step:  # else ranks have several contributions in each training step
            shifts = {rank: (item - self._default_offset) // self.local_steps for rank, item in self._offsets.items()}
            self.shifts = {rank: shift for rank, shift in shifts.items() if shift}
            self._start_number = min(counted[rank] + shifts[rank] for rank in counted)

    # ---- counting --------------------------------------------------------------------------

    def _count_contribution(self, rank: int) -> None:
        self.num_counted[rank] = number = self.num_counted[rank] + 1
        self._num_uncommitted[rank] = self._num_uncommitted.get(rank, 0) + 1
        self._standing.put(rank, number + self.shifts.get(rank, 0))

    def _count_part(self, key: int, continues: bool) -> None:
        """Count a contribution of one part of the model (`key` is its rank), or a round of them (`key` is ROUNDS).

        If it continues a training step, the offset takes back the training step that the contribution has added.
        """
        self.in_step[key] = self.in_step.get(key, 0) + 1 if continues else 1
        if not continues:
            return
        if key == ROUNDS:
            self._default_offset -= self.local_steps
            self._offsets = {rank: offset - self.local_steps for rank, offset in self._offsets.items()}
        else:
            self._offsets[key] = self._offsets.get(key, self._default_offset) - self.local_steps

    def _commit(self, ranks: tuple[int, ...], reason: str, scales: tuple[float, ...] = ()) -> Commit:
        """Returns the commit of all that was folded since the version before, from these ranks."""
        self.version += 1
        if self.committed_by is None:
            self.committed_by = tuple(self._ranks)
        for rank in ranks:
            self._num_uncommitted[rank] -= 1
            if missing := self._missing_steps.pop(rank, 0):
                self._offsets[rank] = self._offsets.get(rank, self._default_offset) - missing
        return Commit(ranks, reason, scales, self._momentum_among())

    def _momentum_among(self) -> int:
        """Workers whose lateness replaces a part of the optimizer's momentum (`shared/late.py`); 1: none."""
        return 1
