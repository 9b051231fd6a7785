"""sync: one optimizer step per round, on the mean gradient of all live workers.

g = sum(n_i g_i) / sum(n_i) with n_i the number of samples. So N workers equal one process with the union batch, even
when their batches differ. A gradient on older weights would break that, so sync has no delayed update.
"""

from __future__ import annotations

from .shared.rounds import RoundPolicy


class SyncPolicy(RoundPolicy):
    steps_jointly = may_aggregate = may_step_by_turns = True


ENTRY = SyncPolicy
