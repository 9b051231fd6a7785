"""async: every contribution is one optimizer step at once, and replied at once.

Nobody waits; the price is staleness, which nothing bounds (Hogwild!, Recht et al. 2011;
Downpour SGD, Dean et al. 2012). If delayed, a worker's own last contribution is one version more. Lateness acts as
momentum, so with several workers less of the optimizer's own is left, and with many late gradients count less
(`shared/late.py`): with four workers, plain momentum 0.9 was measured to end at chance, with 16 no momentum at all.
"""

from __future__ import annotations

from pydantic import Field

from .shared.late import LateOptions
from .single import SinglePolicy


class AsyncOptions(LateOptions):
    pull_every: int = Field(1, ge=1, description="async: fetch weights with every Nth contribution")


class AsyncPolicy(SinglePolicy):
    Options = AsyncOptions
    options: AsyncOptions

    @classmethod
    def summary(cls, options: AsyncOptions) -> str:
        return options.late_rule

    @property
    def pull_every(self) -> int:
        return self.options.pull_every


ENTRY = AsyncPolicy
