"""async: every contribution is one optimizer step at once, and answered at once.

Nobody waits; the price is staleness, which nothing bounds (Hogwild!, Recht et al. 2011;
Downpour SGD, Dean et al. 2012). Pipelined, a worker's own last contribution is one version more. Lateness acts as
momentum, so with several workers less of the optimizer's own is left (`shared/late.py`): with four workers, plain
momentum 0.9 was measured to end at chance.
"""

from __future__ import annotations

from pydantic import Field

from .shared.late import LateOptions
from .single import SinglePolicy, has_less_momentum


class AsyncOptions(LateOptions):
    pull_every: int = Field(1, ge=1, description="async: fetch weights with every Nth contribution")


class AsyncPolicy(SinglePolicy):
    Options = AsyncOptions
    options: AsyncOptions
    less_momentum = True

    @classmethod
    def told(cls, options: AsyncOptions) -> str:
        return "less momentum the more workers" if has_less_momentum(cls, options) else ""

    @property
    def pull_every(self) -> int:
        return self.options.pull_every


ENTRY = AsyncPolicy
