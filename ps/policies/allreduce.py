"""allreduce: workers average their gradients among themselves, and each runs its own optimizer along the mean.

The result is that of sync (Patarasuk and Yuan 2009; DDP, Li et al. 2020), but gradients do not pass the server. The
server names the group: a *generation* is a set of members. A contribution is a completion without a payload. It says
that the worker has the mean of this generation. The server closes the round when all members have completed, and only
then do they step. So all members of a generation take a step, or none does. Completions count when the round closes,
not when they arrive.

When a member leaves, the server starts a new generation and discards the open round. The others still have their
gradients, and average them once more. A worker that joins is in the group from the next round on.

With `staleness` K a worker computes while up to K of its gradients are on their way (Pipe-SGD, Li et al. 2018). The
gradient of step t is computed on the weights of version t - 1 - K, or newer ones, and all step along the mean K steps
later. A completion says how far behind it is (`base_version`); the server refuses one that is further behind. A worker
that would be more than K ahead waits for its own oldest mean, so the server need not hold it back.

The server has the weights only where a completion uploaded them: for snapshots, for evaluations, and with the last
step. Where no length of the run is known, the server asks for them when all workers have finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ...common.config.option import Section
from ...common.kinds import ContributionKind
from ...common.wire.records import Counts, GroupInfo, Row
from .base import Closed, Common, Contribution, Decision, Discard, Fold, Member, Outcome, Policy, Refuse, Wait, names
from .rules import RoundRule


class AllreduceOptions(Section):
    staleness: int = Field(
        0, ge=0, le=64, description="allreduce: means that may be outstanding, each of which is a model in memory"
    )


@dataclass(frozen=True)
class _Report:
    """A member's completion: only facts that are equal on all shards, since shards compare their states."""

    counts: Counts
    weight: float  # in the mean
    has_failed: bool
    has_weights: bool


class AllreducePolicy(Policy):
    Options = AllreduceOptions
    options: AllreduceOptions
    kind = ContributionKind.COMPLETION
    has_rounds = True
    rules = (RoundRule,)

    def __init__(self, common: Common, options: AllreduceOptions) -> None:
        super().__init__(common, options)
        self.num_in_flight = options.staleness
        self.generation = 0  # grows with each group
        self.group: tuple[int, ...] = ()  # the ranks of its members
        self.over_generation = 0  # the newest generation that lost a member
        self._reports: dict[int, _Report] = {}  # of the open round, by rank
        self._outside: set[int] = set()  # live ranks that join the next group
        self._brought = 0  # the newest version whose weights the server has

    @classmethod
    def summary(cls, options: AllreduceOptions) -> str:
        return f"staleness {options.staleness}" if options.staleness else ""

    @property
    def staleness_bound(self) -> int | None:
        return self.options.staleness or None

    def restore(self, version: int, rows: Mapping[int, Row], state: Mapping[str, Any]) -> None:
        super().restore(version, rows, state)
        self._brought = version

    @property
    def has_newest_weights(self) -> bool:
        return self._brought == self.version

    def group_info(self, rank: int) -> GroupInfo:
        """The lowest rank uploads weights where the next step is the last, or may be and others are outstanding."""
        may_be_last = bool(self.num_in_flight)
        if self.training_steps is not None:
            may_be_last = self.steps_done(rank) + 1 >= self.training_steps
        uploads = bool(self.group) and rank == self.group[0] and (self.is_stopping or may_be_last)
        return GroupInfo(self.generation, self.group, "", self.has_newest_weights, uploads)

    def weights_uploaded(self) -> None:
        self._brought = self.version

    def next_local_steps(self, rank: int) -> int:
        """A stopped run takes one more step, whose weights are uploaded."""
        if not self.is_stopping or self.has_newest_weights:
            return super().next_local_steps(rank)
        return 1 if self.training_steps is None else max(0, min(1, self.training_steps - self.steps_done(rank)))

    def disconnected(self, rank: int) -> None:
        super().disconnected(rank)
        self._reports.pop(rank, None)  # it will complete again

    def contributed(self, rank: int, contribution: Contribution, now: float) -> list[Decision]:
        if contribution.id.seq == self.seq(rank):  # a repeat: it lost the reply
            self._reports.pop(rank, None)
        return super().contributed(rank, contribution, now)

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        rank, base = member.rank, contribution.base.version
        if self.version - base > self.num_in_flight and not contribution.completion.failed:
            message = f"computed on version {base}, and version {self.version + 1} is to be made of it"
            return [Discard(rank), Refuse(rank, "BAD_REQUEST", f"{message}: {self.num_in_flight} may lie between")]
        self._owe(member, Outcome.DROPPED)  # until all others have completed too
        generation = contribution.completion.generation or self.generation
        if rank in self._outside or generation != self.generation or contribution.counts.part:
            return [Discard(rank)]
        has_weights = contribution.kind.has_payload
        weight, has_failed = self._weight(contribution), contribution.completion.failed
        self._reports[rank] = _Report(contribution.counts, weight, has_failed, has_weights)
        return [Wait(rank)]

    def _joined(self, rank: int) -> list[Decision]:
        self._outside.add(rank)
        self.newest_holders -= {rank}
        return []

    def _left(self, rank: int) -> list[Decision]:
        self._reports.pop(rank, None)
        if rank not in self._outside:
            self.over_generation = self.generation
        self._outside.discard(rank)
        return []

    def _advance(self, now: float) -> list[Decision]:
        # No round follows for which the workers outside of the group could wait.
        is_through = self._outside and self._ranks and not self.next_local_steps(self._ranks[0])
        if self.generation == self.over_generation or not self.group or is_through:
            return self._form()
        if len(self._reports) < len(self.group):
            return []
        if any(report.has_failed for report in self._reports.values()):
            return self._form()
        decisions = self._close()
        return decisions + self._form() if self._outside else decisions

    def _form(self) -> list[Decision]:
        """Start a generation with all live workers; completions of the one before are discarded."""
        if not self._ranks:
            return []
        self.generation += 1
        self.group = tuple(self._ranks)
        self._outside.clear()
        dropped, self._reports = sorted(self._reports), {}
        return [Discard(rank) for rank in dropped]

    def _close(self) -> list[Decision]:
        """Close the round."""
        for rank in self.group:
            self._count(self.members[rank], self._reports[rank].counts)
        folds = [Fold(rank, self._reports[rank].weight) for rank in self.group]
        self.committed_by = self.group
        commit = self._commit(self.group, f"all {len(self.group)} members of the group have the mean")
        if any(report.has_weights for report in self._reports.values()):
            self._brought = self.version
        self.newest_holders = frozenset(self.group)
        self._reports = {}
        return [*folds, commit]

    def _gate(self, member: Member, now: float) -> Closed | None:
        if member.rank in self._reports:
            return Closed(self._progress() + 1, self._why_open)
        if member.rank in self._outside:
            return Closed(self._progress() + 1, lambda: "the end of the others' step: this worker joins the next group")
        return None

    def _why_open(self) -> str:
        missing = [rank for rank in self.group if rank not in self._reports]
        message = f"{len(self._reports)} of {len(self.group)} members of the group have the mean"
        return f"{message}; missing rank {names(missing)}"

    def _progress(self) -> int:
        return self.generation + self.version  # it grows with every generation and every round


ENTRY = AllreducePolicy
