"""Pure rules for late gradients, computed on weights that others have changed since.

A gradient's staleness tau is the number of versions made since the weights it was computed on (`Policy.staleness`).

    scale    multiplies its learning rate: inverse by 1 / max(1, tau) (Zhang et al., IJCAI 2016), polynomial by
             (1 + tau)^-1/2 (FedAsync, Xie et al. 2019)
    cut      drops it at tau or later; its worker continues from fresh weights (Ringmaster ASGD)
    momentum N workers that step one by one act as a momentum of 1 - 1/N (Mitliagkas et al. 2016), so the optimizer
             uses max(0, 1 - N (1 - mu)) of the configured mu: 0.9 becomes 0.6 with 4 workers, and 0 from 10 on.
             With more than MANY live workers that is not enough, and the default scale is polynomial

The rules scale the learning rate and not the gradient, because Adam would ignore the latter. `momentum` is the number
of that name in torch's SGD and RMSprop; Adam's betas are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from ....common.config.option import Flag, Section

_KEY = Flag(programs=())  # no flag: rarely set
_MODES = "async, ssp, dssp: "

MANY = 8

SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda tau: 1.0,
    "inverse": lambda tau: 1.0 / max(1, tau),
    "polynomial": lambda tau: (1.0 + tau) ** -0.5,
}


class LateOptions(Section):
    """`options` of modes in which every contribution is a step."""

    late_momentum: Annotated[bool, _KEY] = Field(
        True, description=_MODES + "less of the optimizer's momentum the more workers step one by one"
    )
    late_scale: Annotated[Literal["none", "inverse", "polynomial"] | None, _KEY] = Field(
        None,
        description=_MODES + "factor of a late gradient's learning rate: 1/tau, or (1+tau)^-0.5, tau versions late; "
        f"unset: 1, but (1+tau)^-0.5 with late_momentum and more than {MANY} workers",
    )
    late_cut: Annotated[int | None, _KEY] = Field(
        None, ge=1, description=_MODES + "a gradient so many versions late, or more, is dropped; none: taken"
    )

    @property
    def scale(self) -> tuple[str, int]:
        """The rule of SCALES, and the number of live workers up to which nothing is scaled."""
        if self.late_scale is not None:
            return self.late_scale, 0
        return ("polynomial" if self.late_momentum else "none"), MANY

    @property
    def late_rule(self) -> str:
        """The effect of the defaults, for people; empty: none."""
        if not self.late_momentum:
            return ""
        scaled = f", above {MANY} lower rates for late gradients" if self.late_scale is None else ""
        return f"lower momentum with more workers{scaled}"


def momentum_left(momentum: float, num_workers: int) -> float:
    """Returns the optimizer's momentum that gives, together with the effect of lateness, `momentum` in all."""
    return max(0.0, 1.0 - num_workers * (1.0 - momentum))
