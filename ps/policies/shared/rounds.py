"""Rounds, as sync and localsgd have them: a round closes when every live worker has contributed once.

When the set of workers is fixed, a round's contributions are folded in rank order. The result is then the same to the
last bit for any order of arrival (floating-point addition is not associative). With a deadline (`straggler_timeout_s`,
`straggler_mad`) or `backup_workers` the set depends on arrival anyway, and so does the order. No upload then waits for
a straggler's (revisiting distributed synchronous SGD, Chen et al. 2016).

A worker's contribution stays in the round when the worker leaves. If the worker comes back before the round has closed,
it starts with the next one.

A worker that leaves before it contributed keeps its position in the order, since it may come back in time. The server
folds contributions of higher ranks when the round closes, or earlier when other live workers need their memory. A
worker whose position has been passed by a fold starts with the next round. So a version depends only on its
contributions. In two cases workers are folded as they come:

    memory           a worker comes to a position that is not passed, and uploads behind it may hold all memory
    `min_workers`    the round has lost so many workers that it needs those that were to start with the next
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pydantic import Field

from ....common.config.option import Section
from ....common.wire.records import Row
from ..base import Closed, Common, Contribution, Decision, Discard, Fold, Member, Outcome, Policy, names
from ..rules import RoundRule

_KEPT_ROUNDS = 8  # of contributions, each live worker's
_LEAST_SHARE = 0.1  # of the median: workers that are all as fast are not cut off by a hair


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


@dataclass(slots=True)
class Deadline:
    """A round's deadline that follows the workers' durations: median + k MAD (`policy.straggler_mad`), in seconds after
    a worker's last reply.

    The median and the median absolute deviation do not move with a few stragglers, however slow they are (Leys et al.
    2013, doi:10.1016/j.jesp.2013.03.013); 1.4826 MAD is a normal distribution's standard deviation. Late contributions
    count with their real duration, so that a deadline does not shrink towards the workers that meet it.
    """

    factor: float  # MADs (times 1.4826) beyond the median
    began: dict[int, float] = field(default_factory=dict)  # the time at which each live rank began to compute
    durations: list[float] = field(default_factory=list)  # of the newest contributions, seconds, the newest last
    after_s: float | None = None  # in the open round; None: it waits for everybody
    round_began: float = 0.0

    def begins(self, ranks: Iterable[int], num_live: int, now: float) -> None:
        """Begin a round for these ranks, which contributed to the one before. It has no deadline while workers have not
        contributed twice each."""
        self.round_began = now
        self.began.update(dict.fromkeys(ranks, now))
        del self.durations[: max(0, len(self.durations) - _KEPT_ROUNDS * num_live)]
        self.after_s = None
        if len(self.durations) >= 2 * max(1, num_live):
            middle = median(self.durations)
            deviation = 1.4826 * median(abs(duration - middle) for duration in self.durations)
            self.after_s = middle + max(self.factor * deviation, _LEAST_SHARE * middle)

    def took(self, rank: int, now: float, counts: bool) -> None:
        """Note the duration of a contribution, on time or late. A worker's first is ignored: the worker may have waited
        for others to join, or compiled. The next one begins now, or with the next round."""
        if counts:
            self.durations.append(now - self.began[rank])
        self.began[rank] = now

    def has_passed(self, missing: Iterable[int], now: float) -> bool:
        """Whether the deadline of all these ranks has passed. Checks each rank only where that is possible."""
        if self.after_s is None or now - self.round_began < self.after_s:
            return False
        return all(now - self.began[rank] >= self.after_s for rank in missing)


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
        # Ranks of this round, ascending: the order of folding. Some left before they contributed, and may come back.
        self._order: list[int] = []
        self._num_folded = 0  # of a fixed set, in that order
        self._late: set[int] = set()  # live ranks that came back after their position was passed: not in this round
        self._as_they_come: set[int] = set()  # ranks of this round that are folded out of order
        self._weights: dict[int, float] = {}  # contributed in this round, also by workers that left since
        self._missing: set[int] = set()  # live ranks that have not contributed
        self._opened_at = 0.0  # time of the round's first contribution
        self._part = 0  # of the model, of the round

    def _has_fixed_set(self) -> bool:
        deadlines = (self.options.straggler_timeout_s, self.options.straggler_mad)
        return deadlines == (None, None) and self.options.backup_workers == 0

    def saved_state(self) -> dict[str, Any]:
        if self._deadline is None:
            return {}
        return {"deadline": {"durations": list(self._deadline.durations), "after_s": self._deadline.after_s}}

    def restore(self, version: int, rows: Mapping[int, Row], state: Mapping[str, Any]) -> None:
        super().restore(version, rows, state)
        if self._deadline is not None:
            saved = state.get("deadline", {})
            self._deadline.durations, self._deadline.after_s = list(saved.get("durations", ())), saved.get("after_s")

    def joined(self, rank: int, now: float) -> list[Decision]:
        if self._deadline is not None:
            self._deadline.began[rank] = now
        return super().joined(rank, now)

    def change(self, options: Any, now: float) -> list[Decision]:
        """Apply options. An open round that gets a deadline folds the contributions it has, in order. One that loses
        its deadline folds as before until it closes: its uploads may have all the memory."""
        self.options = options
        found = self._fold_rest() if self.has_fixed_set and not self._has_fixed_set() else []
        self.has_fixed_set = self.has_fixed_set and self._has_fixed_set()
        return found + super().change(options, now)

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        if self._deadline is not None:
            self._deadline.took(member.rank, now, counts=not member.is_fresh)
        counts = contribution.counts
        is_of_round = contribution.base.version == self.version and (not self._weights or counts.part == self._part)
        if not is_of_round:
            self._owe(member, Outcome.DROPPED)  # `_settle` replies, so not while training is on hold
            return [Discard(member.rank)]
        self._count(member, counts)
        self._part = counts.part
        self._opened_at = self._opened_at if self._weights else now
        self._weights[member.rank] = self._weight(contribution)
        self._missing.remove(member.rank)
        if self.has_fixed_set and member.rank not in self._as_they_come:
            return self._fold_next()
        return [Fold(member.rank, self._weights[member.rank])]

    def _joined(self, rank: int) -> list[Decision]:
        if rank in self._weights:
            return []
        position = bisect_left(self._order, rank)
        if self._order[position : position + 1] != [rank]:  # otherwise it comes back to its position
            if not self.has_fixed_set or self._has_room(position):
                self._order.insert(position, rank)
            elif position < self._num_folded:
                self._late.add(rank)
                return []
            else:
                self._as_they_come.add(rank)
        self._missing.add(rank)
        return self._fold_next() if self.has_fixed_set else []

    def _left(self, rank: int) -> list[Decision]:
        # Its contribution stays in the round; a missing one is not waited for.
        if rank in self._weights:
            return []
        if rank in self._late:
            self._late.remove(rank)
            return []
        self._missing.remove(rank)
        if rank in self._as_they_come:
            self._as_they_come.remove(rank)
        elif not self.has_fixed_set or rank in self.finished_ranks:  # otherwise its position stays, vacant
            position = bisect_left(self._order, rank)
            del self._order[position]
            self._num_folded -= position < self._num_folded
        return self._fold_next() if self.has_fixed_set else []

    def _has_room(self, position: int) -> bool:
        """Whether a rank can still be folded at this position. Uploads of later positions may hold all memory."""
        first, most = self._num_folded, self.common.max_staged
        if position < first:
            return False
        is_behind_them = position == len(self._order) or not self.has_started
        return is_behind_them or most is None or position - first >= most or len(self._order) - first < most

    def _fold_next(self) -> list[Decision]:
        """Returns folds of the contributions that the order of a fixed set allows."""
        decisions: list[Decision] = []
        while self._num_folded < len(self._order):
            rank = self._order[self._num_folded]
            if rank in self._weights:
                decisions.append(Fold(rank, self._weights[rank]))
                self._num_folded += 1
            elif rank not in self.members and self._is_memory_needed():
                del self._order[self._num_folded]
            else:
                break
        return decisions

    def _is_memory_needed(self) -> bool:
        """Whether all uploads that may be staged before the next vacant position have come, and another worker waits
        for their memory. No other worker waits for it where the round needs one more worker to close."""
        most, first = self.common.max_staged, self._num_folded
        if most is None or len(self._order) <= first + most or len(self.members) < self._needed:
            return False
        return all(rank in self._weights or rank not in self.members for rank in self._order[first : first + most])

    def _fold_rest(self) -> list[Decision]:
        """Stop waiting for vacant positions of a fixed set."""
        rest = self._order[self._num_folded :]
        return [Fold(rank, self._weights[rank]) for rank in rest if rank in self._weights]

    def _why_close(self, now: float) -> str | None:
        """Returns the reason that the open round closes now; None while it stays open."""
        contributed, num_missing = len(self._weights), len(self._missing)
        if (num_missing and self.has_fixed_set) or contributed < max(1, self._needed):
            return None
        if not num_missing:
            live = len(self.members) - len(self._late)
            departed = contributed - live
            others = f", and {departed} before leaving" if departed else ""
            return f"{live} of {live} live workers contributed{others}"
        if num_missing <= self.options.backup_workers:
            return f"{contributed} contributed, {num_missing} of {self.options.backup_workers} backup workers did not"
        timeout_s = self.options.straggler_timeout_s
        if timeout_s is not None and now - self._opened_at >= timeout_s:
            return f"{contributed} contributed within {timeout_s:g} s, rank {names(sorted(self._missing))} did not"
        if self._deadline is not None and self._deadline.has_passed(self._missing, now):
            message = f"{contributed} contributed within {self._deadline.after_s:.3g} s (policy.straggler_mad)"
            return f"{message}, rank {names(sorted(self._missing))} did not"
        return None

    def _advance(self, now: float) -> list[Decision]:
        if self._late and not self._missing and len(self._weights) < self._needed:
            # Take late workers into the round, when too few are left without them (`min_workers`).
            self._missing, self._late = self._late, set()
            if self._weights:
                self._as_they_come |= self._missing
            else:
                self._order, self._num_folded = sorted(self._missing), 0
            self._waiting.ask_all()
        reason = self._why_close(now)
        if reason is None:
            return []
        rest = self._fold_rest() if self.has_fixed_set and self._num_folded < len(self._order) else []
        if self._late:
            self.committed_by = tuple(rank for rank in self._ranks if rank not in self._late)
        elif self.committed_by is not None and len(self.committed_by) != len(self._ranks):
            self.committed_by = None  # some workers were late for this round
        commit = self._commit(tuple(sorted(self._weights)), reason)
        self._order, self._missing, self._num_folded = list(self._ranks), set(self._ranks), 0
        self._late.clear()
        self._as_they_come.clear()
        if self._deadline is not None:
            self._deadline.begins(self._weights, len(self.members), now)
        self._weights = {}
        self.has_fixed_set = self.has_fixed_set or self._has_fixed_set()
        return [*rest, commit]

    def _gate(self, member: Member, now: float) -> Closed | None:
        is_done = member.rank in self._weights or member.rank in self._late
        return Closed(self.version + 1, self._why_open) if is_done else None

    def _why_open(self) -> str:
        live = len(self.members) - len(self._late)
        return f"{live - len(self._missing)} of {live} workers contributed; missing rank {names(sorted(self._missing))}"

    def upload_position(self, rank: int) -> int:
        may_wait = self.has_fixed_set and (rank in self.members or rank in self._weights)
        if not may_wait or rank in self._as_they_come:
            return 0
        return bisect_left(self._order, rank, self._num_folded) - self._num_folded
