"""What sync and localsgd share: rounds that close when every live worker has contributed once.

A round's contributions are folded in rank order when the set of workers is fixed, so that a
run is the same to the last bit whatever the order of arrival (floating-point addition is not
associative). With `straggler_timeout_s` or `backup_workers` the set depends on arrival anyway,
and so does the order: nobody's upload then waits for a straggler's (revisiting distributed
synchronous SGD, Chen et al. 2016).
"""

from __future__ import annotations

from .base import Contribution, Decision, Discard, Fold, Member, Options, Outcome, Policy


class RoundPolicy(Policy):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.has_fixed_set = options.straggler_timeout_s is None and options.backup_workers == 0
        self._order: list[int] = []  # of this round; who joins in the middle comes last
        self._weights: dict[int, float] = {}  # contributed in this round, also by workers that left since
        self._folded: set[int] = set()
        self._opened_at: float | None = None  # time of the round's first contribution

    def committed_steps(self) -> dict[int, int]:
        return {rank: step - (rank in self._weights) for rank, step in self.last_step.items()}

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        if contribution.base_version != self.version:
            member.pending = Outcome.DROPPED  # answered by _settle, so not while training holds
            return [Discard(member.rank)]
        self._count(member)
        self._weights[member.rank] = self._weight(contribution)
        if self._opened_at is None:
            self._opened_at = now
        return self._fold_next()

    def _joined(self, rank: int) -> list[Decision]:
        if rank not in self._order:
            self._order.append(rank)
            if not self.has_started:
                self._order.sort()
        return []

    def _left(self, rank: int) -> list[Decision]:
        # What it contributed stays in the round; what it did not is not waited for.
        if rank not in self._weights and rank in self._order:
            self._order.remove(rank)
        return self._fold_next()

    def _fold_next(self) -> list[Decision]:
        """Fold what has come, as far as the order allows."""
        decisions: list[Decision] = []
        for rank in self._order:
            if rank in self._folded:
                continue
            if rank in self._weights:
                decisions.append(self._fold(rank))
            elif self.has_fixed_set:
                break
        return decisions

    def _fold(self, rank: int) -> Fold:
        self._folded.add(rank)
        return Fold(rank, self._weights[rank])

    def _missing(self) -> list[int]:
        return sorted(rank for rank in self.members if rank not in self._weights)

    def _why_close(self, now: float) -> str | None:
        """Why the open round closes now; None while it stays open."""
        contributed, missing = len(self._weights), self._missing()
        if contributed < max(1, self.options.min_workers):
            return None
        if not missing:
            return f"{contributed} of {contributed} live workers contributed"
        if len(missing) <= self.options.backup_workers:
            return f"{contributed} contributed, {len(missing)} of {self.options.backup_workers} backup workers did not"
        timeout_s = self.options.straggler_timeout_s
        if timeout_s is not None and self._opened_at is not None and now - self._opened_at >= timeout_s:
            return f"{contributed} contributed within {timeout_s:g} s, rank {', '.join(map(str, missing))} did not"
        return None

    def _advance(self, now: float) -> list[Decision]:
        reason = self._why_close(now)
        if reason is None:
            return []
        ranks = tuple(rank for rank in self._order if rank in self._weights)
        decisions: list[Decision] = [self._fold(rank) for rank in ranks if rank not in self._folded]
        decisions.append(self._commit(ranks, reason))
        self._order = sorted(self.members)
        self._weights, self._folded, self._opened_at = {}, set(), None
        return decisions

    def _gate(self, member: Member) -> str | None:
        if member.rank not in self._weights:
            return None
        missing = ", ".join(map(str, self._missing()))
        num_live = len(self.members)
        return f"{num_live - len(self._missing())} of {num_live} workers contributed; missing rank {missing}"

    def _rounds_done(self, rank: int) -> int:
        return self.version

    def staleness(self, rank: int, contribution: Contribution) -> int:
        # A contribution stands on the average that it contains, or it would undo the round before. Pipelined,
        # all but the first were computed before that average came.
        computed_before = self.options.pipelined and rank in self.members and not self.members[rank].is_fresh
        return super().staleness(rank, contribution) + computed_before

    def upload_position(self, rank: int) -> int:
        if not self.has_fixed_set or rank not in self._order:
            return 0
        ahead = self._order[: self._order.index(rank)]
        return sum(1 for other in ahead if other not in self._folded)
