"""async: every contribution is one optimizer step at once, and answered at once.

Nobody waits; the price is staleness, which nothing bounds (Hogwild!, Recht et al. 2011;
Downpour SGD, Dean et al. 2012). Pipelined, a worker's own last contribution is one version more. Lateness acts as
momentum, so with several workers less of the optimizer's own is left, and with many late gradients count less
(`shared/late.py`): with four workers, plain momentum 0.9 was measured to end at chance, with 16 no momentum at all.
"""

from __future__ import annotations

from pydantic import Field

from .shared.late import MANY, LateOptions
from .single import SinglePolicy, has_less_momentum


class AsyncOptions(LateOptions):
    pull_every: int = Field(1, ge=1, description="async: fetch weights with every Nth contribution")


class AsyncPolicy(SinglePolicy):
    Options = AsyncOptions
    options: AsyncOptions
    less_momentum = True

    @classmethod
    def told(cls, options: AsyncOptions) -> str:
        if not has_less_momentum(cls, options):
            return ""
        scaled = f", beyond {MANY} a lower rate the later" if options.late_scale is None else ""
        return f"less momentum the more workers{scaled}"

    @property
    def pull_every(self) -> int:
        return self.options.pull_every


ENTRY = AsyncPolicy
