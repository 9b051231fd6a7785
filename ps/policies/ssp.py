"""ssp: like async, but a worker may begin a contribution only while at most s ahead of the slowest.

Stale synchronous parallel (Ho et al. 2013). With c contributions of its own and bound s, a worker goes on when
c - min(those of live workers) <= s: s = 0 is lockstep, and after a contribution a worker is at most s + 1 ahead.
Gradients are applied one by one, so s = 0 is not sync SGD; the staleness of a contribution is at most (2s + 1)(N - 1),
because between two contributions of one worker each other one can make at most 2s + 1. (A rule found elsewhere, "the
next one minus the minimum <= s", deadlocks at s = 0.)

Lateness affects learning despite the bound. With several workers the server reduces the optimizer's own momentum, as in
async (`shared/late.py`).

With the delayed update the reply to contribution c lets a worker send c + 1, which it has computed meanwhile, and begin
c + 2. The contribution in flight counts: the worker continues when c + 1 - min <= s. So no worker is more than s ahead
when it begins one. That needs s >= 1, or the slowest worker itself would wait. Staleness is then at most
2s(N - 1) + 1, for N > 1 no more than without.

The reason: contribution j is computed on the weights of the reply to j - 2 (at the start of j - 1, where the same count
gives less). One of its own, j - 1, lies between. At that reply every other worker had made at least j - 1 - s. When j
is applied, none has made more than s + (j - 1), because the contribution in flight was counted when it was admitted.
The difference is 2s.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .base import Closed, Member, names
from .rules import CutRule, LeadRule, SingleRule
from .shared.late import LateOptions
from .single import SinglePolicy


class SspOptions(LateOptions):
    staleness: int = Field(3, ge=0, description="ssp, dssp: lead with which a worker may begin a contribution")


class SspPolicy(SinglePolicy):
    Options = SspOptions
    options: SspOptions
    rules = (SingleRule, CutRule, LeadRule)
    changeable: ClassVar[tuple[str, ...]] = ("staleness",)
    staleness_in_flight = 1  # it is one ahead

    @classmethod
    def summary(cls, options: SspOptions) -> str:
        return ", ".join(filter(None, (f"staleness {options.staleness}", options.late_rule)))

    @property
    def staleness_bound(self) -> int:
        return self.options.staleness

    def _gate(self, member: Member, now: float) -> Closed | None:
        ahead = self._ahead(member.rank)
        if ahead <= self.options.staleness:
            return None
        return Closed(self.min_steps_done + ahead - self.options.staleness, lambda: self._why_ahead(ahead))

    def _ahead(self, rank: int) -> int:
        """Returns the lead with which the rank begins its next contribution."""
        return self.lead(rank) + self.num_in_flight

    def _why_ahead(self, ahead: int) -> str:
        counted, bound = " with the one in flight" if self.num_in_flight else "", self.options.staleness
        slowest = f"rank {names(self._standing.slowest_ranks)} at {self.min_steps_done}"
        return f"{ahead} contributions ahead{counted}; the next may begin at most {bound} ahead; slowest is {slowest}"

    def _progress(self) -> int:
        return self.min_steps_done


ENTRY = SspPolicy
