"""async: every contribution is one optimizer step at once, and answered at once.

Nobody waits; the price is staleness, which nothing bounds (Hogwild!, Recht et al. 2011;
Downpour SGD, Dean et al. 2012). Pipelined, a worker's own last contribution is one version more.
"""

from __future__ import annotations

from pydantic import Field

from ...common.config.option import Section
from .single import SinglePolicy


class AsyncOptions(Section):
    pull_every: int = Field(1, ge=1, description="async: fetch weights with every Nth contribution")


class AsyncPolicy(SinglePolicy):
    Options = AsyncOptions
    options: AsyncOptions

    @property
    def pull_every(self) -> int:
        return self.options.pull_every


ENTRY = AsyncPolicy
