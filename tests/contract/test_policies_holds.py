"""When training starts and holds, and how many steps each worker takes."""

from __future__ import annotations

import pytest

from paramserver.common.registry import MODES
from paramserver.ps.policies.base import Outcome, Reply
from paramserver.tests.contract.policies import ALL_MODES, make_policy
from paramserver.worker.session import Progress

from ..records import contribution_of, joined, reply_of

# ---- holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALL_MODES)
def test_training_starts_when_all_workers_have_joined(mode: str) -> None:
    policy = make_policy(mode, num_workers=3)
    assert policy.joined(2, 0.0) == []
    assert policy.joined(0, 0.0) == []
    assert policy.waiting_reason(0.0) == "2 of 3 workers have joined; missing rank 1"
    replies = policy.joined(1, 0.0)
    assert [(reply.rank, reply.outcome) for reply in replies] == [(rank, Outcome.START) for rank in range(3)]
    assert policy.waiting(0.0) == {}
    # Once started, fewer than num_workers go on.
    assert all(not isinstance(d, Reply) for d in policy.left(2, 0.0))
    assert policy.waiting(0.0) == {}
    # among all-reduce peers it is in the group when the others have taken their step.
    assert [a.outcome for a in policy.joined(2, 0.0)] == ([] if policy.kind.has_peers else [Outcome.START])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_training_holds_below_min_workers(mode: str) -> None:
    policy = make_policy(mode, min_workers=2)
    assert policy.joined(0, 0.0) == []
    assert len(policy.joined(1, 0.0)) == 2
    policy.left(1, 0.0)
    decisions = policy.contributed(0, contribution_of(1, 0), 0.0)
    assert not any(isinstance(decision, Reply) for decision in decisions)
    assert policy.waiting(0.0) == {0: "1 of at least 2 workers (policy.min_workers) are live"}
    assert policy.tick(1e9) == [], "no time-out lifts a hold"
    back = policy.joined(1, 0.0)
    assert 1 in {decision.rank for decision in back if isinstance(decision, Reply)}


# ---- steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("steps", "local_steps"), [(1, 1), (1, 4), (7, 3), (8, 4), (10, 1)])
def test_a_worker_takes_exactly_its_steps(mode: str, steps: int, local_steps: int) -> None:
    """The steps between replies add up to `steps`, also where a contribution covers several that do not divide it."""
    policy = joined(mode, 2, training_steps=steps, local_steps=local_steps)
    taken = 0
    step = 0
    while (num := policy.next_local_steps(0)) > 0:
        assert policy.next_local_steps(1) == num
        assert num <= policy.local_steps
        assert policy.steps_done(0) == taken
        taken += num
        step += 1
        for rank in (0, 1):
            policy.contributed(rank, contribution_of(step, policy.version, num_steps=num), 0.0)
        assert step <= steps
    assert taken == steps
    assert policy.steps_done(0) == policy.steps_done(1) == steps
    assert policy.waiting(0.0) == {}


@pytest.mark.parametrize("mode", ALL_MODES)
def test_finished_workers_hold_nobody_back(mode: str) -> None:
    """The one that is slow, or comes late, still takes all its steps while the others have ended."""
    policy = joined(mode, 2, training_steps=4, staleness=10)
    for seq in range(1, 5):
        policy.contributed(0, contribution_of(seq, policy.version), 0.0)
        if policy.waiting(0.0):
            policy.contributed(1, contribution_of(seq, policy.version), 0.0)
    for seq in range(policy.seq(1) + 1, 5):
        policy.contributed(1, contribution_of(seq, policy.version), 0.0)
        assert policy.waiting(0.0) == {}
    assert policy.next_local_steps(0) == policy.next_local_steps(1) == 0


@pytest.mark.parametrize("mode", [mode for mode in ALL_MODES if MODES.load(mode).may_delay_update])
@pytest.mark.parametrize(("steps", "local_steps"), [(1, 1), (7, 3), (8, 4), (10, 1)])
def test_delayed_update_workers_guess_their_steps_right(mode: str, steps: int, local_steps: int) -> None:
    """Before its reply has come a worker knows how many local steps follow, and which contribution is the last."""
    policy = joined(mode, 1, training_steps=steps, local_steps=local_steps, staleness=3, delayed_update=True)
    progress = Progress(total_steps=steps)
    progress.replied(reply_of(0, 0, policy.next_local_steps(0)))
    is_last = False
    while not is_last:
        num = progress.local_steps
        is_last = progress.assume_counted()
        policy.contributed(0, contribution_of(progress.row.seq, policy.version, num_steps=num), 0.0)
        assert progress.local_steps == progress.steps_left == policy.next_local_steps(0)
        assert progress.row.steps == policy.steps_done(0)
        assert is_last == (policy.next_local_steps(0) == 0)
    assert progress.row.seq == policy.seq(0)
