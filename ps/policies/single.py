"""Base of async, ssp and dssp: every contribution is one optimizer step, with rules for late ones."""

from __future__ import annotations

from typing import ClassVar

from ...common.config.option import Section
from .base import Common, Contribution, Decision, Discard, Fold, Member, Outcome, Policy
from .rules import CutRule, Rule, SingleRule
from .shared.late import SCALES, LateOptions


class SinglePolicy(Policy):
    """A mode whose options extend `LateOptions` applies their rules; any other ignores lateness."""

    may_delay_update = True
    rules: ClassVar[tuple[type[Rule], ...]] = (SingleRule, CutRule)

    def __init__(self, common: Common, options: Section) -> None:
        super().__init__(common, options)
        late = options if isinstance(options, LateOptions) else LateOptions(late_momentum=False)
        self._cut, self._has_less_momentum = late.late_cut, late.late_momentum
        (self._scale, self._few), most = late.scale, common.num_workers
        self.may_scale = self.may_scale or (self._scale != "none" and (most is None or most > self._few))

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        rank, lr_scale = member.rank, 1.0
        among = self.num_active  # with this one, whose last contribution it may be
        if self._has_less_momentum:
            self._momentum_among = among
        scale = SCALES[self._scale] if self._scale != "none" and among > self._few else None
        if self._cut is not None or scale is not None:
            tau = self.staleness(rank, contribution)
            if self._cut is not None and tau >= self._cut:
                self._owe(member, Outcome.DROPPED)
                return [Discard(rank)]
            lr_scale = scale(tau) if scale is not None else 1.0
        self._count(member, contribution.counts)
        commit = self._commit((rank,), f"contribution {contribution.id.seq} of rank {rank}", lr_scale)
        return [Fold(rank, self._weight(contribution)), commit]
