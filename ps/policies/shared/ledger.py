"""Abilities of a mode, and the counts of its run: versions, and for each rank one row (`Row`), as counted and as
committed, for the policy and its snapshots.

A row changes in two places. `Policy._count` adds what a contribution says (of a region, `uncount` takes back
the samples that the run above did not take), and `_commit` copies the rows of its ranks. A rank
that is new begins at the training step of the slowest live rank, and one that missed a round goes on with the others.
A training step is one `step()` of a rank; with local steps a contribution has several of them, and in a model that is
stepped in parts a training step has several contributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from ....common.config.option import Section
from ....common.kinds import ContributionKind
from ....common.wire.records import NO_ROW, Counts, GroupInfo, Row
from ..rules import Rule
from .decisions import Commit, Common, Member, Outer, Standing


class Ledger:
    """The abilities of a mode, which other code queries, and its members with their progress.

    A mode overrides the abilities that differ. `min_steps_done`, `lead` and `steps_done` take constant time."""

    # ---- abilities --------------------------------------------------------------------------

    # The mode's own options: a subclass beside its policy, whose fields `--help` and the configuration show.
    Options: ClassVar[type[Section]] = Section
    # The rules of its histories, beyond those of every mode.
    rules: ClassVar[tuple[type[Rule], ...]] = ()
    kind: ContributionKind = ContributionKind.GRADIENT  # what workers send
    # A commit is one step along the gradients of all, so a robust aggregate may replace their mean
    # (policy.aggregation).
    may_aggregate: ClassVar[bool] = False
    # Workers may compute their next contribution while an exchange is in flight (policy.delayed_update), from this
    # policy.staleness on.
    may_delay_update: ClassVar[bool] = False
    least_delayed_staleness: ClassVar[int] = 0
    # A version is a round of all live workers, who all get it. The run's length is then counted in versions, and not
    # in each worker's contributions.
    has_rounds: ClassVar[bool] = False
    # A step may be made of the contributions of several workers, which must have the same hyperparameters.
    steps_jointly: ClassVar[bool] = False
    # A contribution may get its reply when it is folded, before its version exists. Its payload must then be in memory
    # that its worker does not write to again.
    replies_before_commit: ClassVar[bool] = False
    # Commits may scale the rate, so the script alone does not determine a contribution's effect on the weights.
    may_scale: bool = False
    # A step has a share for each contribution. A skipped one (store.on_nonfinite) counts as zeros, so that the others
    # do not move its share.
    skipped_is_zeros: ClassVar[bool] = False
    # A version may be made of the sum of gradients instead of their mean: a contribution's weight is its samples.
    may_sum: ClassVar[bool] = True
    # Several optimizers of a model may step by turns (session.optimizers).
    may_step_by_turns: ClassVar[bool] = False
    changeable: ClassVar[tuple[str, ...]] = ()  # options that may change while the run goes on (`Policy.change`)
    over_generation: int = 0  # the newest generation of peers of which a member has left
    local_steps: int = 1  # training steps in one contribution
    pull_every: int = 1  # workers fetch weights with every Nth contribution
    fragments: int = 1  # parts of the parameters, of which each contribution has one by turns
    outstanding: int = 0  # means of peers that may be outstanding while a worker continues
    overlap_steps: int = 0  # local steps of a worker during an exchange of deltas; 0: all up to the next contribution
    newest_holders: AbstractSet[int] = frozenset()  # ranks whose workers have the newest weights; the server lacks them

    @classmethod
    def summary(cls, options: Any) -> str:
        """Returns the text beside the mode's name, such as `staleness 3`; empty where there is none."""
        return ""

    @property
    def outer(self) -> Outer | None:
        """The outer optimizer, where workers contribute deltas. It may change from commit to commit."""
        return None

    @property
    def staleness_bound(self) -> int | None:
        """The lead with which a worker may still continue; in rounds, the versions that a gradient may be behind. None:
        no bound."""
        return None

    @property
    def has_newest_weights(self) -> bool:
        """Whether the server has the weights of the newest version."""
        return True

    def weights_uploaded(self) -> None:
        """Note that the server has the newest weights now."""

    def group_info(self, rank: int) -> GroupInfo | None:
        """The group that this worker averages in; None where workers have no peers."""
        return None

    def upload_position(self, rank: int) -> int:
        """Contributions that are folded before this worker's; uploads are staged in this order."""
        return 0

    # ---- state ------------------------------------------------------------------------------

    def __init__(self, common: Common) -> None:
        self.common = common
        self.members: dict[int, Member] = {}
        self.training_steps = common.training_steps  # without a configured number workers may announce it later
        self.version = 0  # commits decided
        # By rank, also after it left, so that a repeated contribution is recognized: all that counts, and what a
        # version has. In modes with rounds a contribution counts with its round: the latter is the rank's `progress`.
        self.rows: dict[int, Row] = {}
        self.committed: dict[int, Row] = {}
        self.progress = self.committed if self.has_rounds else self.rows
        self.is_parted = False  # the script steps the model in parts
        self.num_parts = 0  # the most of the training steps that have ended, without those of long ago
        self._num_shorter = 0  # steps with fewer parts since the newest with so many
        self.finished_ranks: set[int] = set()  # no worker waits for them
        self.is_stopping = False  # no worker begins another contribution
        self.committed_by: tuple[int, ...] | None = None  # members at the newest commit; None: they have changed
        self._ranks: list[int] = []  # of the members, ascending
        self._momentum_among = 1  # workers whose lateness replaces a part of the momentum (`shared/late.py`)
        self._standing = Standing[int]()  # the live ranks in the order of their training steps

    # ---- questions ------------------------------------------------------------------------

    def row(self, rank: int) -> Row:
        """Returns where the rank is in the run."""
        return self.progress.get(rank, NO_ROW)

    def seq(self, rank: int) -> int:
        """Returns the sequence number of the rank's newest contribution that counts."""
        return self.rows.get(rank, NO_ROW).seq

    def steps_done(self, rank: int) -> int:
        """Returns the training steps of the rank that count."""
        return self.progress.get(rank, NO_ROW).steps

    @property
    def min_steps_done(self) -> int:
        """Training steps of the slowest live rank. If none is live, those of the slowest known rank."""
        least = self._standing.least
        return min(map(self.steps_done, self.rows), default=0) if least is None else least

    def lead(self, rank: int) -> int:
        """Returns how many training steps a live worker is ahead of the slowest live worker."""
        return self.steps_done(rank) - self.min_steps_done

    def next_local_steps(self, rank: int) -> int:
        """Returns the training steps that the worker's next contribution covers, or 0 if it takes no more steps."""
        if self.is_stopping:
            return 0
        if self.training_steps is None:
            return self.local_steps
        most, left = self.local_steps, self.training_steps - self.progress.get(rank, NO_ROW).steps
        return most if most < left else left if left > 0 else 0

    def wrong_counts(self, rank: int, counts: Counts, is_relay: bool = False) -> str:
        """Returns what is wrong with the counts of a contribution that arrives, as a sentence; empty: nothing.

        A region contributes when its own version is complete, which may have more steps than were asked for, and none
        at its end."""
        num_steps, most = counts.num_steps, self.local_steps
        if is_relay or 0 < num_steps <= most:
            return ""
        message = f"rank {rank} contributes {num_steps} training steps and {counts.num_batches} batches"
        if num_steps:
            return f"{message}; at most {most} steps were asked for"
        if counts.part and self.rows.get(rank, NO_ROW).part and not counts.num_batches:
            return ""
        return f"{message}, which is no later part of a training step"

    @property
    def is_within_step(self) -> bool:
        """Whether later parts of the round's training step are to come, or may come: a worker that continues from a
        snapshot of this version would compute them on other weights than these ranks did."""
        parts = [self.rows[rank].part for rank in self._ranks] if self.is_parted and self.has_rounds else []
        return bool(parts) and self.num_parts not in parts

    @property
    def num_active(self) -> int:
        """Live workers that have training steps to take. Those that step a model in parts all count."""
        num = len(self._ranks)
        if self.training_steps is None or self.has_rounds or self.local_steps > 1 or self.is_parted:
            return num
        return num - self._standing.count(self.training_steps)

    def is_through(self, rank: int) -> bool:
        """Whether the rank has taken all its training steps. Only the worker knows whether the last has more parts."""
        return not (self.next_local_steps(rank) or self.row(rank).part)

    # ---- what a snapshot keeps -------------------------------------------------------------

    def saved_state(self) -> dict[str, Any]:
        """Returns the mode's other state at the newest version, as JSON, without anything that came after it."""
        return {}

    def restore(self, version: int, rows: Mapping[int, Row], state: Mapping[str, Any]) -> None:
        """Continue from a snapshot, before any event. `rows` and `state` are what `committed` and `saved_state` were at
        that version, perhaps in another mode. Any workers may join.

        In modes with rounds all ranks go on at the training step of the slowest unfinished rank."""
        self.version = version
        found = dict(rows)
        if self.has_rounds and found:
            least = min(found[rank].steps for rank in found.keys() - self.finished_ranks or found)
            found = {rank: row._replace(steps=least) for rank, row in found.items()}
        self.rows, self.committed = found, dict(found)
        self.progress = self.committed if self.has_rounds else self.rows
        self.is_parted = any(row.part for row in found.values())

    # ---- counting --------------------------------------------------------------------------

    def _admit(self, rank: int) -> None:
        """A worker is live from now on. A new rank begins where the slowest live rank is, or where the run was when the
        last one left, so that it neither stalls the others nor repeats their work."""
        if rank not in self.rows:
            other = next(iter(self._standing.slowest_ranks), None)
            if other is None:
                known = self.rows.keys() - self.finished_ranks or self.rows
                other = max(known, key=lambda known: (self.steps_done(known), -known), default=rank)
            self.rows[rank] = self.committed[rank] = NO_ROW.at(self.row(other))
        self._standing.add(rank, self.steps_done(rank))

    def uncount(self, rank: int, num_samples: int) -> None:
        """The run above did not take the rank's newest contribution: its samples count for nothing."""
        for rows in (self.rows, self.committed):
            if (samples := rows[rank].samples) is not None:
                rows[rank] = rows[rank]._replace(samples=samples - num_samples)

    def _commit(self, ranks: tuple[int, ...], reason: str, lr_scale: float = 1.0) -> Commit:
        """Returns the commit of all that was folded since the version before: everything that counts of these ranks."""
        self.version += 1
        if self.committed_by is None:
            self.committed_by = tuple(self._ranks)
        rows, committed = self.rows, self.committed
        if not self.has_rounds:
            for rank in ranks:
                committed[rank] = rows[rank]
            return Commit(ranks, reason, lr_scale, self._momentum_among)
        if len(ranks) < len(rows):
            # Ranks that missed the round go on where it has led, after as many of their own batches.
            first = max(ranks, key=lambda rank: rows[rank].steps)
            newest, num_batches = rows[first], rows[first].batches - committed[first].batches
            for rank in rows.keys() - set(ranks) - self.finished_ranks:
                if (row := rows[rank]).steps <= newest.steps:
                    rows[rank] = row._replace(steps=newest.steps, batches=row.batches + num_batches, part=newest.part)
        committed.update(rows)
        self._standing.put({rank: rows[rank].steps for rank in self.members})
        return Commit(ranks, reason, lr_scale, self._momentum_among)
