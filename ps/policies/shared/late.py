"""What is done about gradients that come late, computed on weights that others have moved since: pure rules.

A gradient's staleness tau is the number of versions made since the weights it was computed on (`Policy.staleness`).

    scale    its learning rate is multiplied: inverse by 1 / max(1, tau) (Zhang et al., IJCAI 2016), polynomial by
             (1 + tau)^-1/2 (FedAsync, Xie et al. 2019)
    cut      at tau or later it is dropped, and its worker goes on from fresh weights (Ringmaster ASGD)
    momentum N workers that step one by one are a momentum of 1 - 1/N by themselves (Mitliagkas et al. 2016), so of the
             mu that was asked for max(0, 1 - N (1 - mu)) is left: 0.9 is 0.6 with 4 workers, and none from 10 on

The scale is the learning rate's and not the gradient's, which an Adam would not notice. Under `momentum` is meant what
torch's SGD and RMSprop call so; Adam's betas are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from ....common.config.option import Flag, Section

_KEY = Flag(programs=())  # no flag: rarely set
_MODES = "async, ssp, dssp: "

SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda tau: 1.0,
    "inverse": lambda tau: 1.0 / max(1, tau),
    "polynomial": lambda tau: (1.0 + tau) ** -0.5,
}


class LateOptions(Section):
    """`options` of modes in which every contribution is a step."""

    late_momentum: Annotated[bool | None, _KEY] = Field(
        None, description=_MODES + "less of the optimizer's momentum the more workers step one by one; none: in async"
    )
    late_scale: Annotated[Literal["none", "inverse", "polynomial"], _KEY] = Field(
        "none", description=_MODES + "learning rate of a gradient tau versions late: times 1/tau, or (1+tau)^-0.5"
    )
    late_cut: Annotated[int | None, _KEY] = Field(
        None, ge=1, description=_MODES + "a gradient so many versions late, or more, is dropped; none: taken"
    )


def momentum_left(momentum: float, num_workers: int) -> float:
    """What is to be asked of the optimizer so that, with what lateness does, there is `momentum` in all."""
    return max(0.0, 1.0 - num_workers * (1.0 - momentum))
