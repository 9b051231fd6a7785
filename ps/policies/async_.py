"""async: every contribution is one optimizer step at once, and answered at once.

Nobody waits; the price is staleness, which nothing bounds (Hogwild!, Recht et al. 2011;
Downpour SGD, Dean et al. 2012). Pipelined, a worker's own last contribution is one version more.
"""

from __future__ import annotations

from .base import Contribution, Decision, Fold, Member, Policy


class AsyncPolicy(Policy):
    may_skip_pulls = True
    may_pipeline = True

    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        self._count(member)
        return [
            Fold(member.rank, self._weight(contribution)),
            self._commit((member.rank,), f"rank {member.rank} contributed step {member.step}"),
        ]


ENTRY = AsyncPolicy
