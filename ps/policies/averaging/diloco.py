"""diloco: every worker takes H steps of its own optimizer, and the server one step along the mean of their deltas.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105; OpenDiLoCo, 2407.07852). A worker contributes a delta: the weights that
it began from minus those it has now, with the sign of a gradient. D is the mean of the deltas, weighted by samples. The
server's *outer* optimizer, torch.optim.SGD with Nesterov momentum, computes

    buf <- mu buf + D;   weights <- weights - lr (D + mu buf)

and every worker continues from the new weights. Its own optimizer (AdamW, say) and that optimizer's state stay with it.
With lr 1 and mu 0 the result is that of localsgd, also with the delayed update. A persistent direction is multiplied by
up to 1 + mu / (1 - mu). Long runs profit from that, short ones do not: in runs of 24 to 96 rounds mu 0.9 was worse than
plain averaging, and 0.5 better.

With P fragments (Streaming DiLoCo, arXiv:2501.18512) a round has H / P steps and exchanges one P-th of the parameters,
number version mod P; the others continue locally. Each part is still exchanged every H steps, and has its own buf. The
last round of a run exchanges all parts.

With the delayed update workers continue during the exchange, and take its result after tau = `overlap_steps` local
steps:

    weights <- new + (weights now - weights at sending)

The next delta is relative to the new weights. The tau steps stay as they are (LOSCAR-SGD; CoCoD-SGD, arXiv:1906.12043).
"""

from __future__ import annotations

from pydantic import Field

from ....common.config.option import Section
from ....common.kinds import ContributionKind
from ..base import Common, Outer
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
        # torch refuses Nesterov without momentum, which would be plain descent.
        return Outer("SGD", {"lr": self.outer_lr, "momentum": momentum, "nesterov": momentum > 0}, reason)


class OverlapOptions(Section):
    """The option of local steps during an exchange (policy.delayed_update)."""

    overlap_steps: int | None = Field(
        None,
        ge=1,
        description="diloco, async_diloco, delayed_update: local steps during an exchange, after which its weights are "
        "taken, at most local_steps / fragments; none: as many",
    )

    @property
    def summary(self) -> str:
        """The text about this option; empty for the default."""
        return f", taken after {self.overlap_steps}" if self.overlap_steps else ""


class DilocoOptions(OverlapOptions, OuterOptions, RoundOptions):
    fragments: int = Field(
        1, ge=1, description="diloco: parts of the model, of which one is exchanged every local_steps / fragments steps"
    )


class DilocoPolicy(RoundPolicy):
    Options = DilocoOptions
    options: DilocoOptions
    kind = ContributionKind.DELTA
    may_aggregate = may_delay_update = True

    def __init__(self, common: Common, options: DilocoOptions) -> None:
        super().__init__(common, options)
        self.fragments, self.overlap_steps = options.fragments, options.overlap_steps or 0
        self.local_steps = options.local_steps // options.fragments

    @classmethod
    def summary(cls, options: DilocoOptions) -> str:
        parts = f", {options.fragments} fragments" if options.fragments > 1 else ""
        return f"{options.local_steps} local steps{parts}{options.summary}"

    @property
    def outer(self) -> Outer:
        outer = self.options.outer
        if (configured := self.options.outer_momentum) is not None:
            return outer(configured, "as policy.outer_momentum says")
        if self.common.keeps_most:
            return outer(0.0, "worker.codec sends most of every delta later, and momentum would sum it up")
        if self.training_steps is None:
            return outer(_MOMENTUM_OF_FEW, "nobody has said how many rounds there are")
        rounds = -(-self.training_steps // self.options.local_steps)
        if rounds >= _MANY_ROUNDS:
            return outer(_MOMENTUM_OF_MANY, f"{rounds:,} rounds, of which {_MANY_ROUNDS} are enough for it")
        return outer(_MOMENTUM_OF_FEW, f"{rounds:,} rounds: {_MOMENTUM_OF_MANY} needs {_MANY_ROUNDS}")


ENTRY = DilocoPolicy
