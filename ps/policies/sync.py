"""sync: one optimizer step per round, on the mean gradient of all live workers.

g = sum(n_i g_i) / sum(n_i) with n_i the number of samples, so that N workers equal one process
with the union batch, also when their batches differ. A gradient computed on older weights while an
exchange is in flight would end that, so sync is never delayed_update.
"""

from __future__ import annotations

from ...common.kinds import ContributionKind
from .shared.rounds import RoundPolicy


class SyncPolicy(RoundPolicy):
    kind = ContributionKind.GRADIENT
    may_aggregate = True


ENTRY = SyncPolicy
