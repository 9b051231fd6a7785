"""localsgd: every worker takes K steps of its own optimizer, then all weights are averaged.

Local SGD (Stich 2018; federated averaging, McMahan et al. 2017), weighted by samples. The
optimizer's state stays with the worker. A last, shorter round covers a number of steps that
K does not divide. Bytes per step are 1/K of sync's.

If delayed, a worker goes on with its next K steps while its weights are averaged, and then has
average + (its weights now - those it sent), which is what it contributes next: delayed averaging
(CoCoD-SGD, Shen et al. 2019; a close relative is Overlap Local-SGD, Wang et al. 2020). With equal
weights of the workers the mean of that is the mean of what they computed, so nothing is lost; the
K steps were taken without the others' last K, which is counted as one version of staleness.

Where a codec leaves out more than weights survive (`Common.leaves_out`), workers contribute how far they went, and the
server steps along the mean of that at a rate of 1: the same mean, but for what the codec keeps for later.
"""

from __future__ import annotations

from pydantic import Field

from ....common.kinds import ContributionKind
from ..base import Common
from ..shared.decisions import Outer
from ..shared.rounds import RoundOptions, RoundPolicy


class LocalSgdOptions(RoundOptions):
    local_steps: int = Field(
        8, ge=1, description="localsgd, diloco, async_diloco: local optimizer steps of a round; none: 8, 25, 25"
    )


class LocalSgdPolicy(RoundPolicy):
    Options = LocalSgdOptions
    options: LocalSgdOptions
    kind = ContributionKind.WEIGHTS
    may_delay_update = True

    def __init__(self, common: Common, options: LocalSgdOptions) -> None:
        super().__init__(common, options)
        if common.leaves_out:
            self.kind = ContributionKind.DELTA

    @classmethod
    def summary(cls, options: LocalSgdOptions) -> str:
        return f"{options.local_steps} local steps"

    @property
    def local_steps(self) -> int:
        return self.options.local_steps

    @property
    def outer(self) -> Outer | None:
        if not self.kind.server_steps:
            return None
        why = "the mean of weights, of which the codec would leave out too much: how far they went is sent"
        return Outer("SGD", {"lr": 1.0, "momentum": 0.0, "nesterov": False}, why)


ENTRY = LocalSgdPolicy
