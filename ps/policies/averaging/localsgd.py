"""localsgd: every worker takes K steps of its own optimizer, then all weights are averaged.

Local SGD (Stich 2018; federated averaging, McMahan et al. 2017), weighted by samples. The optimizer's state stays with
the worker. The last round is shorter where K does not divide the number of steps. Bytes per step are 1/K of sync's.

With the delayed update a worker takes its next K steps while its weights are averaged. It then contributes
average + (its weights now - those it sent): delayed averaging (CoCoD-SGD, Shen et al. 2019; compare Overlap Local-SGD,
Wang et al. 2020). With equally weighted workers no step is lost. The K steps did not see the others' last K steps,
which counts as one version of staleness.

With a codec (`Common.rounds`), in either direction, workers contribute deltas, and the server steps along their mean at
a rate of 1: the same mean, except for the residual that the codec sends later. Encoded weights would lose every step
below the codec's precision, and after encoded replies the mean of weights would not have what the reply rounded away.
"""

from __future__ import annotations

from pydantic import Field

from ....common.kinds import ContributionKind
from ..base import Common, Outer
from ..shared.rounds import RoundOptions, RoundPolicy
from .diloco import OuterOptions


class LocalSgdOptions(RoundOptions):
    local_steps: int = Field(8, ge=1, description=OuterOptions.model_fields["local_steps"].description)


class LocalSgdPolicy(RoundPolicy):
    Options = LocalSgdOptions
    options: LocalSgdOptions
    kind = ContributionKind.WEIGHTS
    may_step_by_turns = may_delay_update = True

    def __init__(self, common: Common, options: LocalSgdOptions) -> None:
        super().__init__(common, options)
        self.local_steps = options.local_steps
        if common.rounds:
            self.kind = ContributionKind.DELTA

    @classmethod
    def summary(cls, options: LocalSgdOptions) -> str:
        return f"{options.local_steps} local steps"

    @property
    def outer(self) -> Outer | None:
        if not self.kind.server_steps:
            return None
        why = "encoded weights would lose small steps, so workers send deltas"
        return Outer("SGD", {"lr": 1.0, "momentum": 0.0, "nesterov": False}, why)


ENTRY = LocalSgdPolicy
