"""async_diloco: like diloco, but a step of the outer optimizer waits for a few workers only, and uses every delta.

It follows Decoupled DiLoCo (arXiv:2604.21428), DN and DyLU (Liu et al. 2024, arXiv:2401.09135). A round closes a window
after `quorum` deltas have arrived, or when no worker is missing. A late delta, from older weights, joins the next
round. A round takes only a share of a step, according to its workers:

    D = sum w_i delta_i / sum w_i;   step along D at a rate of outer_lr * (sum w_i / sum of all live workers' newest w)

So one worker alone moves the weights by 1/N of its delta, and all together by their mean. The weight w is n^2 / s for
n samples in s local steps: the samples, times the samples of a step. Outer momentum is 0 by default, because deltas
that arrive one by one act as momentum.

    window   clamp(grace * (x - q), 0, grace_cap_s): x is the mean time of this round's deltas in seconds, q the quorum
    steps    H_i = ceil(H speed_i / fastest speed): slower workers take fewer steps (DyLU). Speed is a moving mean of
             steps per second of computing, as the worker reports it. If it included exchanges, a slow link would
             lead to fewer steps, so to more exchanges, down to one step; without a report it does include them

    delay    N = `outer_delay`: outer momentum moves with every N-th delta only (DN: `DelayedNesterov`), by
             the movement of the weights since. A round of k deltas takes c k of it; the round with the N-th, the rest

With the delayed update workers continue during the exchange, as in diloco (`diloco.py`). A reply's number of steps
arrives while the worker takes others, so it applies to the steps after those; the worker reports how many it took.

Every worker takes all training steps of the run, so workers differ in their number of contributions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any

from pydantic import Field, model_validator

from ....common.config.option import Flag
from ....common.kinds import ContributionKind
from ....common.wire.records import Row
from ..base import Closed, Commit, Common, Contribution, Decision, Fold, Member, Outer, Policy, Reply
from ..shared.decisions import Standing
from .diloco import OuterOptions, OverlapOptions

_NEWEST = 0.5  # weight of the newest measurement in a worker's speed
_DEFAULT_MOMENTUM = 0.5  # default of policy.outer_momentum with policy.outer_delay


class AsyncDilocoOptions(OverlapOptions, OuterOptions):
    outer_lr: float = Field(1.0, gt=0, description=OuterOptions.model_fields["outer_lr"].description)
    quorum: int = Field(1, ge=1, description="async_diloco: deltas, after which a round waits for `grace` only")
    grace: float = Field(
        0.1, ge=0, le=1, description="async_diloco: part of a delta's time that a round takes for more than the quorum"
    )
    grace_cap_s: float = Field(30.0, ge=0, description="async_diloco: seconds after the quorum at which a round closes")
    even_pace: bool = Field(True, description="async_diloco: slower workers take fewer local steps of a contribution")
    outer_delay: int | None = Field(
        None,
        ge=1,
        description="async_diloco: outer momentum moves with every so manyth delta, the number of workers say (delayed "
        "Nesterov); none: with every round",
    )
    outer_delay_part: Annotated[float, Flag(programs=())] = Field(
        0.0, ge=0, le=1, description="async_diloco: part of it that every delta takes, at most 1 / outer_delay"
    )

    @model_validator(mode="after")
    def _of_use(self) -> AsyncDilocoOptions:
        delay, part = self.outer_delay, self.outer_delay_part
        if delay is not None and self.outer_momentum == 0:
            problem = f"policy.outer_delay is {delay} and policy.outer_momentum 0, so that no momentum waits"
            raise ValueError(f"{problem}: set policy.outer_momentum to 0.5, say, or leave policy.outer_delay out")
        if part and (delay is None or part * delay > 1):
            problem = f"policy.outer_delay_part is {part:g} and policy.outer_delay {delay or 'none'}"
            rule = "every delta of so many takes that part of the momentum, all of them together at most 1"
            raise ValueError(f"{problem}: {rule}")
        return self


@dataclass
class Speeds:
    """Local steps per second of live workers, with the fastest at hand."""

    _by_rank: dict[int, float] = field(default_factory=dict)  # minus the speeds, so the least is of the fastest
    _standing: Standing[float] = field(default_factory=Standing)

    def measured(self, rank: int, speed: float) -> None:
        before = self._by_rank.get(rank, -speed)
        self.forget(rank)
        self._by_rank[rank] = now = (1 - _NEWEST) * before - _NEWEST * speed
        self._standing.add(rank, now)

    def forget(self, rank: int) -> None:
        if (before := self._by_rank.pop(rank, None)) is not None:
            self._standing.remove(rank, before)

    def share(self, rank: int) -> float:
        """Returns a worker's speed as a share of the fastest, 0 to 1; 1 while its speed is unknown."""
        speed, fastest = self._by_rank.get(rank), self._standing.least
        return 1.0 if speed is None or fastest is None else speed / fastest


@dataclass
class Weights:
    """The newest weight of each live worker; a worker without one counts as the mean of the others."""

    _by_rank: dict[int, float] = field(default_factory=dict)
    _sum: float = 0.0

    def put(self, rank: int, weight: float) -> None:
        self._sum += weight - self._by_rank.get(rank, 0.0)
        self._by_rank[rank] = weight

    def forget(self, rank: int) -> None:
        self._sum -= self._by_rank.pop(rank, 0.0)
        if not self._by_rank:
            self._sum = 0.0  # removes the rounding error

    def share(self, contributed: Collection[float], num_missing: int) -> float:
        """Returns the share of the contributed weights in the weights that all workers would contribute."""
        num, whole = len(contributed), len(contributed) + num_missing
        total = self._sum * whole / len(self._by_rank) if self._by_rank else 0.0
        return min(1.0, sum(contributed) / total) if total > 0 else num / whole


class AsyncDilocoPolicy(Policy):
    Options = AsyncDilocoOptions
    options: AsyncDilocoOptions
    kind = ContributionKind.DELTA
    may_delay_update = may_scale = skipped_is_zeros = True

    def __init__(self, common: Common, options: AsyncDilocoOptions) -> None:
        super().__init__(common, options)
        self.local_steps, self.overlap_steps = options.local_steps, options.overlap_steps or 0
        self._round: dict[int, float] = {}  # weights, by the rank that contributed, in that order
        self._took_s = 0.0  # summed time of the round's deltas
        self._since_moved = 0  # deltas in commits since the delayed momentum moved
        self._opened_at = self._closes_at = 0.0
        self._missing: dict[int, None] = {}  # live ranks with steps to take that are not in the round
        self._replied: dict[int, float] = {}  # time of the reply
        # delayed_update: the time of a rank's newest contribution
        self._handed_over: dict[int, float] = {}
        self._speeds, self._weights = Speeds(), Weights()

    @classmethod
    def summary(cls, options: AsyncDilocoOptions) -> str:
        momentum = f", momentum every {options.outer_delay} deltas" if options.outer_delay else ""
        return f"{options.local_steps} local steps, quorum {options.quorum}{momentum}{options.summary}"

    @property
    def outer(self) -> Outer:
        momentum, reason = self.options.outer_momentum, "as policy.outer_momentum says"
        if self.options.outer_delay is not None:
            numbers = {"lr": self.options.outer_lr, "momentum": _DEFAULT_MOMENTUM if momentum is None else momentum}
            return Outer("DelayedNesterov", numbers, f"it moves with every {self.options.outer_delay} deltas")
        return self.options.outer(*((0.0, "deltas that come one by one") if momentum is None else (momentum, reason)))

    # ---- training steps: a contribution has at most H of them ------------------------------

    def next_local_steps(self, rank: int) -> int:
        most = super().next_local_steps(rank)
        if most <= 1 or not self.options.even_pace:
            return most
        wanted = ceil(self.options.local_steps * self._speeds.share(rank)) or 1
        return most if most < wanted else wanted

    def saved_state(self) -> dict[str, Any]:
        return {"since_moved": self._since_moved}

    def restore(self, version: int, rows: Mapping[int, Row], state: Mapping[str, Any]) -> None:
        super().restore(version, rows, state)
        self._since_moved = state.get("since_moved", 0)

    # ---- who comes and goes -----------------------------------------------------------------

    def _joined(self, rank: int) -> list[Decision]:
        self._is_missing(rank)
        return []

    def _left(self, rank: int) -> list[Decision]:
        """Its contribution stays in the round. Its speed is dropped: a rank may come back on another machine."""
        self._missing.pop(rank, None)
        self._replied.pop(rank, None)
        self._handed_over.pop(rank, None)
        self._speeds.forget(rank)
        self._weights.forget(rank)
        is_last = self._round and not self.members and rank in self.finished_ranks
        return [self._close("the last worker has finished")] if is_last else []

    def _is_missing(self, rank: int) -> None:
        if rank not in self._round and super().next_local_steps(rank):  # at an even pace it is one at least
            self._missing[rank] = None

    def _settle(self, now: float) -> list[Decision]:
        decisions = super()._settle(now)
        for decision in decisions:
            if isinstance(decision, Reply):
                self._replied[decision.rank] = self._handed_over.pop(decision.rank, now)
        return decisions

    def last_commit(self) -> list[Decision]:
        return [self._close("no worker contributes any more")] if self._round else []

    # ---- rounds -------------------------------------------------------------------------------

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        rank, steps = member.rank, contribution.counts.num_steps
        replied_at = self._replied.pop(rank, now)
        self._count(member, contribution.counts)
        self._missing.pop(rank, None)
        if self.num_in_flight:
            self._handed_over[rank] = now
        if steps and (took_s := round(contribution.timing.compute_s, 6) or now - replied_at) > 0:
            self._speeds.measured(rank, steps / took_s)
        weight = self._weight(contribution)
        if self.common.weighting == "samples":
            weight *= weight / max(1, steps)
        self._weights.put(rank, weight)
        self._opened_at = self._opened_at if self._round else now
        self._round[rank] = weight
        self._took_s += now - replied_at
        if len(self._round) == self.options.quorum:
            took_s, waited_s = self._took_s / len(self._round), now - self._opened_at
            self._closes_at = now + min(max(self.options.grace * (took_s - waited_s), 0.0), self.options.grace_cap_s)
        return [Fold(rank, weight)]

    def _advance(self, now: float) -> list[Decision]:
        num = len(self._round)
        if not num:
            return []
        if not self._missing or self.is_stopping:
            return [self._close(f"{num} contributed, nobody is missing")]
        if num < self.options.quorum or now < self._closes_at:
            return []
        return [self._close(f"{num} contributed, {self.options.quorum} are enough, {len(self._missing)} are missing")]

    def _close(self, reason: str) -> Commit:
        weights, self._round, self._took_s = self._round, {}, 0.0
        share = self._weights.share(weights.values(), len(self._missing)) if self._missing else 1.0
        if self.options.outer_delay is None:
            commit = self._commit(tuple(weights), reason, share)
        else:
            commit = self._commit(tuple(weights), reason)
            commit.numbers = self._nesterov(len(weights), share, self.options.outer_delay)
        for rank in weights:
            if rank in self.members:
                self._is_missing(rank)
            if rank not in self._missing:
                self._weights.forget(rank)
        return commit

    def _nesterov(self, num: int, share: float, delay: int) -> Mapping[str, float]:
        """Returns the optimizer's numbers for a commit of so many deltas. The share is a number of its own, not part of
        the rate, because the movements of the weights are summed at any rate."""
        before, moves = self._since_moved, self._since_moved + num >= delay
        self._since_moved = 0 if moves else before + num
        part = self.options.outer_delay_part
        return {"share": share, "part": 1 - part * before if moves else part * num, "moves": float(moves)}

    def _gate(self, member: Member, now: float) -> Closed | None:
        return Closed(self.version + 1, self._why_open) if member.rank in self._round else None

    def _why_open(self) -> str:
        return f"{len(self._round)} contributed, {self.options.quorum} are enough; {len(self._missing)} are missing"


ENTRY = AsyncDilocoPolicy
