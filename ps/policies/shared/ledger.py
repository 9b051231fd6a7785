"""Counts versions, and for each rank one row (`Row`): as counted, and as committed, for the policy and its snapshots.

A row changes in two places. `Policy._count` adds what a contribution says (of a region, `uncount` takes back
the samples that the run above did not take), and `_commit` copies the rows of its ranks. A rank
that is new begins at the training step of the slowest live rank, and one that missed a round goes on with the others.
A training step is one `step()` of a rank; with local steps a contribution has several of them, and in a model that is
stepped in parts a training step has several contributions.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from ....common.wire.records import NO_ROW, Counts, Row
from .decisions import Commit
from .members import Common, Member
from .standing import Standing
from .traits import Traits


class Ledger(Traits):
    """The members and their progress. `min_steps_done`, `lead` and `steps_done` take constant time."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.members: dict[int, Member] = {}
        self.training_steps = common.training_steps  # without a configured number workers may announce it later
        self.version = 0  # commits decided
        # By rank, also after it left, so that a repeated contribution is recognized: all that counts, and what a
        # version has. In modes with rounds a contribution counts with its round, so progress is read from the latter.
        self.rows: dict[int, Row] = {}
        self.committed: dict[int, Row] = {}
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
        return (self.committed if self.has_rounds else self.rows).get(rank, NO_ROW)

    def seq(self, rank: int) -> int:
        """Returns the sequence number of the rank's newest contribution that counts."""
        return self.rows.get(rank, NO_ROW).seq

    def steps_done(self, rank: int) -> int:
        """Returns the training steps of the rank that count."""
        return (self.committed if self.has_rounds else self.rows).get(rank, NO_ROW).steps

    @property
    def min_steps_done(self) -> int:
        """Training steps of the slowest live rank. If none is live, those of the slowest known rank."""
        least = self._standing.least
        return min(map(self.steps_done, self.rows), default=0) if least is None else least

    def slowest_members(self, most: int) -> list[int]:
        """Returns the `most` live ranks with the fewest training steps; within a round, those that it waits for."""
        if self.has_rounds:
            return heapq.nsmallest(most, self._ranks, key=lambda rank: self.rows[rank].steps)
        return self._standing.first(most)

    def lead(self, rank: int) -> int:
        """Returns how many training steps a live worker is ahead of the slowest live worker."""
        return self.steps_done(rank) - self.min_steps_done

    def next_local_steps(self, rank: int) -> int:
        """Returns the training steps that the worker's next contribution covers, or 0 if it takes no more steps."""
        if self.is_stopping:
            return 0
        if self.training_steps is None:
            return self.local_steps
        most, left = self.local_steps, self.training_steps - self.steps_done(rank)
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

    def _commit(self, ranks: tuple[int, ...], reason: str, scales: tuple[float, ...] = ()) -> Commit:
        """Returns the commit of all that was folded since the version before: everything that counts of these ranks."""
        self.version += 1
        if self.committed_by is None:
            self.committed_by = tuple(self._ranks)
        rows, committed = self.rows, self.committed
        if self.has_rounds:
            self._close_round(ranks)
        else:
            for rank in ranks:
                committed[rank] = rows[rank]
        return Commit(ranks, reason, scales, self._momentum_among)

    def _close_round(self, ranks: tuple[int, ...]) -> None:
        """Ranks that missed the round go on where it has led, after as many of their own batches."""
        rows, committed = self.rows, self.committed
        if len(ranks) < len(rows):
            first = max(ranks, key=lambda rank: rows[rank].steps)
            newest, num_batches = rows[first], rows[first].batches - committed[first].batches
            for rank in rows.keys() - set(ranks) - self.finished_ranks:
                if (row := rows[rank]).steps <= newest.steps:
                    rows[rank] = row._replace(steps=newest.steps, batches=row.batches + num_batches, part=newest.part)
        for rank in self.members:
            self._standing.move(rank, committed[rank].steps, rows[rank].steps)
        committed.update(rows)
