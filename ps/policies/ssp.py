"""ssp: like async, but a worker may start a step only while it is at most s ahead of the slowest.

Stale synchronous parallel (Ho et al. 2013). With step c and bound s, a worker goes on when
c - min(live steps) <= s: s = 0 is lockstep, and after a contribution a worker is at most
s + 1 ahead. Gradients are applied one by one, so s = 0 is not sync SGD; the staleness of a
contribution is at most (2s + 1)(N - 1), because between two contributions of one worker each
other one can make at most 2s + 1.

(A rule found elsewhere, "next step minus minimum <= s", deadlocks at s = 0.)
"""

from __future__ import annotations

from .async_ import AsyncPolicy
from .base import Member


class SspPolicy(AsyncPolicy):
    may_skip_pulls = False

    @property
    def staleness_bound(self) -> int:
        return self.options.staleness

    def _gate(self, member: Member) -> str | None:
        bound, slowest = self.staleness_bound, self.min_step
        if member.step - slowest <= bound:
            return None
        ranks = ", ".join(str(m.rank) for m in self.members.values() if m.step == slowest)
        return (
            f"{member.step - slowest} steps ahead, at most {bound} allowed; slowest is rank {ranks} at step {slowest}"
        )


ENTRY = SspPolicy
