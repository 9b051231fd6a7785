"""What sync and localsgd share: rounds that close when every live worker has contributed once.

A round's contributions are folded in rank order when the set of workers is fixed, so that a
run is the same to the last bit whatever the order of arrival (floating-point addition is not
associative). With a deadline (`straggler_timeout_s`, `straggler_mad`) or `backup_workers` the set
depends on arrival anyway, and so does the order: nobody's upload then waits for a straggler's
(revisiting distributed synchronous SGD, Chen et al. 2016).

What a worker contributed stays in the round when it leaves. When it comes back before the round has closed,
it starts with the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ....common.config.option import Section
from ..base import ROUNDS, Closed, Common, Contribution, Decision, Discard, Fold, Member, Outcome, Policy, names
from ..rules import RoundRule
from .deadline import Deadline


class RoundOptions(Section):
    straggler_timeout_s: float | None = Field(
        None, gt=0, description="sync, localsgd, diloco: seconds after a round's first contribution at which it closes"
    )
    straggler_mad: float | None = Field(
        None,
        gt=0,
        description="sync, localsgd, diloco: it closes so many (normal) deviations, 1.48 MAD, beyond the median time "
        "that workers have taken lately; 3 to 5",
    )
    backup_workers: int = Field(0, ge=0, description="sync, localsgd, diloco: a round closes without this many")


class RoundPolicy(Policy):
    Options = RoundOptions
    options: RoundOptions
    rules = (RoundRule,)
    changeable = ("straggler_timeout_s",)
    has_rounds = True

    def __init__(self, common: Common, options: RoundOptions) -> None:
        super().__init__(common, options)
        self.has_fixed_set = self._has_fixed_set()
        self._deadline = None if options.straggler_mad is None else Deadline(options.straggler_mad)
        self._order: list[int] = []  # of folding in this round; who joins in the middle comes last
        self._num_sorted = 0  # of those, before who joined in the middle
        self._num_folded = 0  # of a fixed set, in that order
        self._weights: dict[int, float] = {}  # contributed in this round, also by workers that left since
        self._missing: list[int] = []  # live ranks that have not contributed, sorted
        self._opened_at: float | None = None  # time of the round's first contribution
        self._part, self._continues = 0, False  # of the model, that its contributions are of; of a training step

    def _has_fixed_set(self) -> bool:
        deadlines = (self.options.straggler_timeout_s, self.options.straggler_mad)
        return deadlines == (None, None) and self.options.backup_workers == 0

    def saved_state(self) -> dict[str, Any]:
        return {} if self._deadline is None else {"deadline": self._deadline.saved()}

    def restore(self, version: int, contributions: Mapping[int, int], state: Mapping[str, Any]) -> None:
        super().restore(version, contributions, state)
        if self._deadline is not None:
            self._deadline.restore(state.get("deadline", {}))

    def joined(self, rank: int, now: float) -> list[Decision]:
        if self._deadline is not None:
            self._deadline.began[rank] = now
        return super().joined(rank, now)

    def change(self, options: Any, now: float) -> list[Decision]:
        """An open round that gets a deadline folds what has come, in order; one that has lost it keeps the order in
        which it has folded until it closes."""
        self.options, found = options, list[Decision]()
        if self.has_fixed_set and not self._has_fixed_set():
            late = self._order[self._num_folded :]
            found = [Fold(rank, self._weights[rank]) for rank in late if rank in self._weights]
        self.has_fixed_set = self._has_fixed_set() and (self.has_fixed_set or not self._weights)
        return found + super().change(options, now)

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        if self._deadline is not None:
            self._deadline.took(member.rank, now, counts=not member.is_fresh)
        is_of_round = contribution.base_version == self.version and contribution.part == (
            self._part if self._weights else contribution.part
        )
        if not is_of_round:
            self._owe(member, Outcome.DROPPED)  # answered by _settle, so not while training holds
            return [Discard(member.rank)]
        self._count(member)
        self._continues = contribution.continues and (self._continues or not self._weights)
        self._part = contribution.part
        self._weights[member.rank] = self._weight(contribution)
        self._is_missing_no_more(member.rank)
        if self._opened_at is None:
            self._opened_at = now
        return self._fold_next() if self.has_fixed_set else [Fold(member.rank, self._weights[member.rank])]

    def _joined(self, rank: int) -> list[Decision]:
        if rank in self._weights:
            return []
        insort(self._missing, rank)
        if self.has_started:
            self._order.append(rank)
        else:
            insort(self._order, rank)
            self._num_sorted += 1
        return []

    def _left(self, rank: int) -> list[Decision]:
        # What it contributed stays in the round; what it did not is not waited for.
        if rank in self._weights:
            return []
        self._is_missing_no_more(rank)
        place = self._place(rank)
        del self._order[place]
        self._num_sorted -= place < self._num_sorted
        return self._fold_next() if self.has_fixed_set else []

    def _place(self, rank: int) -> int:
        """Index of a rank in the order, which holds it."""
        place = bisect_left(self._order, rank, 0, self._num_sorted)
        is_there = place < self._num_sorted and self._order[place] == rank
        return place if is_there else self._order.index(rank, self._num_sorted)

    def _is_missing_no_more(self, rank: int) -> None:
        del self._missing[bisect_left(self._missing, rank)]

    def _fold_next(self) -> list[Decision]:
        """Fold what has come, as far as the order of a fixed set allows."""
        decisions: list[Decision] = []
        while self._num_folded < len(self._order) and (rank := self._order[self._num_folded]) in self._weights:
            decisions.append(Fold(rank, self._weights[rank]))
            self._num_folded += 1
        return decisions

    def _why_close(self, now: float) -> str | None:
        """Why the open round closes now; None while it stays open."""
        contributed, num_missing = len(self._weights), len(self._missing)
        if contributed < max(1, self._needed):
            return None
        if not num_missing:
            gone = contributed - len(self.members)
            return f"{contributed - gone} of {len(self.members)} live workers contributed" + (
                f", and {gone} before leaving" if gone else ""
            )
        if num_missing <= self.options.backup_workers:
            return f"{contributed} contributed, {num_missing} of {self.options.backup_workers} backup workers did not"
        timeout_s = self.options.straggler_timeout_s
        if timeout_s is not None and self._opened_at is not None and now - self._opened_at >= timeout_s:
            return f"{contributed} contributed within {timeout_s:g} s, rank {names(self._missing)} did not"
        if self._deadline is not None and self._deadline.has_passed(self._missing, now):
            told = f"{contributed} contributed within {self._deadline.after_s:.3g} s (policy.straggler_mad)"
            return f"{told}, rank {names(self._missing)} did not"
        return None

    def _advance(self, now: float) -> list[Decision]:
        reason = self._why_close(now)
        if reason is None:
            return []
        commit = self._commit(tuple(rank for rank in self._order if rank in self._weights), reason)
        if self._part:
            self._stepped_part(ROUNDS, self._continues)
        self._order, self._missing = list(self._ranks), list(self._ranks)
        self._num_sorted, self._num_folded = len(self._order), 0
        if self._deadline is not None:
            self._deadline.begins(self._weights, len(self.members), now)
        self._weights, self._opened_at = {}, None
        self.has_fixed_set = self._has_fixed_set()
        return [commit]

    def _gate(self, member: Member, now: float) -> Closed | None:
        return Closed(self.version + 1, self._why_open) if member.rank in self._weights else None

    def _why_open(self) -> str:
        live = len(self.members)
        return f"{live - len(self._missing)} of {live} workers contributed; missing rank {names(self._missing)}"

    def _progress(self) -> int:
        return self.version

    def upload_position(self, rank: int) -> int:
        may_wait = self.has_fixed_set and (rank in self.members or rank in self._weights)
        return max(0, self._place(rank) - self._num_folded) if may_wait else 0
