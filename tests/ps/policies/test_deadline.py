"""policy.straggler_mad: a round closes median + k MAD after its begin, of what workers have taken lately."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from paramserver.common.wire.records import Contribution
from paramserver.ps.policies.base import Commit, Discard

from ...records import contribution_of, joined

TIMES = st.lists(st.lists(st.floats(0.9, 1.2), min_size=4, max_size=4), min_size=3, max_size=12)


def contribution(policy: object, rank: int) -> Contribution:
    counted = policy.seq(rank)  # type: ignore[attr-defined]
    return contribution_of(counted + 1, policy.version)  # type: ignore[attr-defined]


def limit_of(durations: list[float], factor: float) -> float:
    """Independently: seconds from a round's begin."""
    middle = float(np.median(durations))
    deviation = 1.4826 * float(np.median(np.abs(np.array(durations) - middle)))
    return middle + max(factor * deviation, 0.1 * middle)


@given(TIMES, st.floats(2.0, 6.0))
def test_a_round_closes_when_an_independent_rule_says(rounds: list[list[float]], factor: float) -> None:
    """Four workers take these times; then rank 3 says nothing any more."""
    policy = joined("sync", 4, straggler_mad=factor)
    began, kept, limit = 0.0, [], np.inf
    for index, times in enumerate(rounds):
        assume(max(times) < limit - 1e-6)  # else it closes without somebody
        for rank in sorted(range(4), key=lambda rank: times[rank]):
            policy.contributed(rank, contribution(policy, rank), began + times[rank])
            if index:  # a worker's first contribution counts for nothing
                kept = [*kept, times[rank]][-32:]
        assert policy.version == index + 1
        began += max(times)
        limit = limit_of(kept, factor) if len(kept) >= 8 else np.inf
    assume(limit < np.inf)
    for rank in range(3):
        policy.contributed(rank, contribution(policy, rank), began + 0.1)
    assert policy.tick(began + limit - 1e-6) == []
    (commit, *_) = policy.tick(began + limit + 1e-6)
    assert isinstance(commit, Commit) and commit.ranks == (0, 1, 2)


def test_a_late_worker_counts_with_what_it_took() -> None:
    """Or the deadline would draw in behind those who meet it: rank 2 takes 3 s, is late, and is in time once most are
    as slow."""
    policy = joined("sync", 3, straggler_mad=3.0)
    at = 0.0
    for _ in range(4):
        for rank in range(3):
            policy.contributed(rank, contribution(policy, rank), at + 1.0)
        at += 1.0
    stale = contribution(policy, 2)
    for rank in (0, 1):
        policy.contributed(rank, contribution(policy, rank), at + 1.0)
    (commit, *_) = policy.tick(at + 1.11)
    assert isinstance(commit, Commit) and commit.ranks == (0, 1) and "policy.straggler_mad" in commit.reason
    assert isinstance(policy.contributed(2, stale, at + 3.0)[0], Discard)
    assert policy._deadline.durations[-1] == 3.0  # type: ignore[attr-defined]
