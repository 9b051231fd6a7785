"""async: every contribution is one optimizer step, and gets its reply at once.

No worker waits, so staleness has no bound (Hogwild!, Recht et al. 2011; Downpour SGD, Dean et al. 2012). A delayed
update adds one version, the worker's own last contribution. Lateness acts as momentum. So with several workers the
server reduces the optimizer's own momentum, and with many it scales late gradients down (`shared/late.py`). Without
this, momentum 0.9 with four workers ended at chance, and so did 16 workers without any momentum.
"""

from __future__ import annotations

from pydantic import Field

from .base import Common
from .shared.late import LateOptions
from .single import SinglePolicy


class AsyncOptions(LateOptions):
    pull_every: int = Field(1, ge=1, description="async: fetch weights with every Nth contribution")


class AsyncPolicy(SinglePolicy):
    Options = AsyncOptions
    options: AsyncOptions
    may_step_by_turns = True

    def __init__(self, common: Common, options: AsyncOptions) -> None:
        super().__init__(common, options)
        self.pull_every = options.pull_every

    @classmethod
    def summary(cls, options: AsyncOptions) -> str:
        return options.late_rule


ENTRY = AsyncPolicy
