"""buffered: contributions get their replies at once, and every K of them, from any workers, make one step.

FedBuff (Nguyen et al. 2022), which with gradients is n-softsync (Zhang et al. 2016). No worker waits. A step is along K
gradients, so the optimizer's own momentum and rate stay usable with more workers than in async. In FedBuff's form,

    weights <- weights - lr / K * sum over the K of s_i g_i,      s_i = (1 + tau_i)^-1/2

tau_i is the number of versions that contribution i is late. Late contributions count less, and the sum is not divided
by the sum of s_i. (Weighted by samples, a g_i counts n_i times, and K is the sum of n_i.) The optimizer gets the mean
of the g_i weighted by s_i, at a rate of lr * sum s_i / K. Adam makes a smaller step of that, unlike the formula.
"""

from __future__ import annotations

from pydantic import Field

from ...common.config.option import Section
from .base import Common, Contribution, Decision, Fold, Member, Policy
from .rules import BufferRule
from .shared.late import SCALES


class BufferedOptions(Section):
    buffer: int | None = Field(
        None, ge=1, description="buffered: contributions in a step; none: a quarter of the live workers, 2 at least"
    )


class BufferedPolicy(Policy):
    Options = BufferedOptions
    options: BufferedOptions
    rules = (BufferRule,)
    steps_jointly = replies_before_commit = may_scale = skipped_is_zeros = True
    may_sum = False  # the weight of a contribution is more than its samples

    def __init__(self, common: Common, options: BufferedOptions) -> None:
        super().__init__(common, options)
        self._buffer: list[int] = []  # ranks whose contributions are folded, in that order
        self._weights = self._scaled = 0.0  # of those: sum of weights, and of weights times s_i

    @classmethod
    def summary(cls, options: BufferedOptions) -> str:
        return f"steps of {options.buffer}" if options.buffer else "steps of a quarter of the workers"

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        scale = SCALES["polynomial"](self.staleness(member.rank, contribution))
        weight = self._weight(contribution)
        self._count(member, contribution.counts)
        self._buffer.append(member.rank)
        self._weights += weight
        self._scaled += weight * scale
        return [Fold(member.rank, weight * scale)]

    def _advance(self, now: float) -> list[Decision]:
        # The last step may be of fewer, as no worker will contribute any more.
        is_last = self.is_stopping or (self.training_steps is not None and self.min_steps_done >= self.training_steps)
        size = self.options.buffer or max(2, self.num_active // 4)
        return [self._step()] if self._buffer and (is_last or len(self._buffer) >= size) else []

    def _left(self, rank: int) -> list[Decision]:
        """Close the last step when the last worker leaves, since scripts decide themselves when they have finished."""
        return [self._step()] if self._buffer and not self.members and rank in self.finished_ranks else []

    def last_commit(self) -> list[Decision]:
        return [self._step()] if self._buffer else []

    def _step(self) -> Decision:
        ranks, self._buffer = tuple(self._buffer), []
        scale, self._weights, self._scaled = self._scaled / self._weights, 0.0, 0.0
        return self._commit(ranks, f"{len(ranks)} contributions", scale)


ENTRY = BufferedPolicy
