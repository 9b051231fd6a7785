"""async_diloco: local steps follow how fast a worker computes, and not how long its exchanges take."""

from __future__ import annotations

import pytest

from paramserver.ps.policies.base import Policy

from ...records import contribution_of, joined

STEP_S = (0.1, 0.1, 0.2)  # of a local step, by rank
EXCHANGE_S = (0.1, 5.0, 0.1)  # worker 1 computes as fast as worker 0, over a slow link


def steps_told(policy: Policy, rounds: int, says_compute: bool) -> list[int]:
    """What each rank is told at last, of contributions on a clock."""
    local_steps = [policy.next_local_steps(rank) for rank in range(3)]
    arrives = {rank: local_steps[rank] * STEP_S[rank] + EXCHANGE_S[rank] for rank in range(3)}
    for _ in range(rounds * 3):
        rank = min(arrives, key=lambda arrive: arrives[arrive])
        now = arrives[rank]
        compute_s = local_steps[rank] * STEP_S[rank] if says_compute else 0.0
        counted = policy.seq(rank) + 1
        policy.contributed(
            rank, contribution_of(counted, policy.version, compute_s=compute_s, num_steps=local_steps[rank]), now
        )
        local_steps[rank] = policy.next_local_steps(rank)
        arrives[rank] = now + local_steps[rank] * STEP_S[rank] + EXCHANGE_S[rank]
    return local_steps


@pytest.mark.parametrize("says_compute", [True, False])
def test_steps_follow_computing(says_compute: bool) -> None:
    policy = joined("async_diloco", 3, training_steps=10_000, local_steps=20, quorum=1)
    found = steps_told(policy, 8, says_compute)
    if says_compute:
        assert found == [20, 20, 10]
    else:  # of a worker that does not say it, all of its time counts
        assert found[0] == 20 and found[1] < 10
