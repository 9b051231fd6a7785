"""diloco: every worker takes H steps of its own optimizer, and the server one along what they come to.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105; OpenDiLoCo, 2407.07852). A worker contributes how far it went, the
weights it began from minus those it has now: positive points downhill, as a gradient does. With D the mean of these,
weighted by samples, the server's own *outer* optimizer, Nesterov's of torch.optim.SGD, does

    buf <- mu buf + D;   weights <- weights - lr (D + mu buf)

and every worker goes on from the new weights; its own optimizer (AdamW, say), with what that remembers, stays with it.
With lr 1 and mu 0 it is localsgd, also where it is delayed_update. A persistent direction is multiplied by up to
1 + mu / (1 - mu), which many rounds make good and few do not: measured, mu 0.9 is worse than plain averaging in runs of
24 to 96 rounds, and 0.5 better.

In P fragments (Streaming DiLoCo, arXiv:2501.18512) a round is H / P steps and exchanges one P-th of the parameters,
that of number version mod P; the others go on locally. Each still is exchanged every H steps, and has its own buf. The
last round of a run exchanges all.

If delayed, workers go on while what they sent is exchanged, and after tau = `overlap_steps` local steps put both
together:

    shift   weights <- new + (weights now - weights at sending)
    blend   weights <- alpha weights now + (1 - alpha) new

and in both the next difference is to the new ones. shift keeps the tau steps as they are (as LOSCAR-SGD does); blend is
the paper's: what it leaves of the worker's own is sent again.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ....common.config.option import Section
from ....common.kinds import ContributionKind
from ..shared.decisions import Merge, Outer
from ..shared.rounds import RoundOptions, RoundPolicy

_MANY_ROUNDS = 500
_MOMENTUM_OF_MANY, _MOMENTUM_OF_FEW = 0.9, 0.5


class OuterOptions(Section):
    local_steps: int = Field(
        25, ge=1, description="localsgd, diloco, async_diloco: local optimizer steps of a round; none: 8, 25, 25"
    )
    outer_lr: float = Field(
        0.7, gt=0, description="diloco, async_diloco: learning rate of the server's outer optimizer; none: 0.7, 1"
    )
    outer_momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="diloco, async_diloco: its Nesterov momentum; none: 0.9 in runs of 500 rounds or more, else 0.5, "
        "with worker.codec sparse 0; async: 0 (with outer_delay 0.5)",
    )

    def outer(self, momentum: float, reason: str) -> Outer:
        # Nesterov without momentum is what torch refuses, and plain descent.
        return Outer("SGD", {"lr": self.outer_lr, "momentum": momentum, "nesterov": momentum > 0}, reason)


def _alpha(value: float) -> float:
    if value == 1:
        raise ValueError("with 1 a worker never takes anything of the others' weights; 0 to less than 1")
    return value


class OverlapOptions(Section):
    """Of local steps that go on during an exchange (policy.delayed_update)."""

    overlap_steps: int | None = Field(
        None,
        ge=1,
        description="diloco, async_diloco, delayed_update: local steps during an exchange, after which its weights are "
        "taken, at most local_steps / fragments; none: as many",
    )
    merge: Literal["shift", "blend"] = Field(
        "shift",
        description="diloco, async_diloco, delayed_update: weights after those steps: new + own steps meanwhile, or "
        "merge_alpha own + the rest new",
    )
    merge_alpha: Annotated[float, AfterValidator(_alpha)] = Field(
        0.5,
        ge=0,
        le=1,
        description="diloco, async_diloco, merge blend: part of the weights that is own; 0 drops the steps meanwhile",
    )

    @property
    def merged(self) -> Merge:
        return Merge(self.merge, self.merge_alpha, self.overlap_steps or 0)

    @property
    def summary(self) -> str:
        """The text about it; empty where there is nothing to say."""
        taken = f", taken after {self.overlap_steps}" if self.overlap_steps else ""
        return taken + (f", blend {self.merge_alpha:g}" if self.merge == "blend" else "")


class DilocoOptions(OverlapOptions, OuterOptions, RoundOptions):
    fragments: int = Field(
        1, ge=1, description="diloco: parts of the model, of which one is exchanged every local_steps / fragments steps"
    )


class DilocoPolicy(RoundPolicy):
    Options = DilocoOptions
    options: DilocoOptions
    kind = ContributionKind.DELTA
    may_aggregate = True
    may_delay_update = True

    @classmethod
    def summary(cls, options: DilocoOptions) -> str:
        parts = f", {options.fragments} fragments" if options.fragments > 1 else ""
        return f"{options.local_steps} local steps{parts}{options.summary}"

    @property
    def local_steps(self) -> int:
        return self.options.local_steps // self.fragments

    @property
    def fragments(self) -> int:
        return self.options.fragments

    @property
    def merge(self) -> Merge:
        return self.options.merged

    @property
    def outer(self) -> Outer:
        return self.options.outer(*self._momentum())

    def _momentum(self) -> tuple[float, str]:
        if (configured := self.options.outer_momentum) is not None:
            return configured, "as policy.outer_momentum says"
        if self.common.keeps_most:
            return 0.0, "worker.codec keeps most of every difference for later, which momentum would add up"
        if self.training_steps is None:
            return _MOMENTUM_OF_FEW, "nobody has said how many rounds there are"
        rounds = -(-self.training_steps // self.options.local_steps)
        if rounds >= _MANY_ROUNDS:
            return _MOMENTUM_OF_MANY, f"{rounds:,} rounds, of which {_MANY_ROUNDS} are enough for it"
        return _MOMENTUM_OF_FEW, f"{rounds:,} rounds: {_MOMENTUM_OF_MANY} needs {_MANY_ROUNDS}"


ENTRY = DilocoPolicy
