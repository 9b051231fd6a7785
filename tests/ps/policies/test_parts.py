"""Contributions of parts of a model: a training step has several, and a round is of one part."""

from __future__ import annotations

import pytest

from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Outcome, Policy

from ...records import contribution_of, joined


def send(policy: Policy, rank: int, part: int, continues: bool = False) -> list[object]:
    number = policy.seq(rank) + 1
    return policy.contributed(rank, contribution_of(number, policy.version, 10, 0 if continues else 1, part), 0.0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_training_step_is_a_batch_whatever_steps_on_it(mode: str) -> None:
    policy = joined(mode, 2, training_steps=3)
    for step in range(1, 4):
        for part, continues in ((1, False), (2, True), (2, True)):
            for rank in (0, 1):
                send(policy, rank, part, continues)
            assert [policy.steps_done(rank) for rank in (0, 1)] == [step, step]
        assert policy.row(0).part == 3
        assert policy.min_steps_done == step
        assert policy.next_local_steps(0) == (step < 3)
    assert not policy.is_through(0), "its last step may have more parts"


def test_a_rank_that_comes_to_a_running_job_begins_at_the_slowest_ones_training_step() -> None:
    policy = joined("async", 1, training_steps=3)
    send(policy, 0, 1)
    send(policy, 0, 2, continues=True)
    policy.joined(5, 0.0)
    assert (policy.steps_done(5), policy.row(5).part) == (1, 2)
    send(policy, 5, 1)
    assert (policy.steps_done(5), policy.min_steps_done) == (2, 1)


def test_a_round_is_of_one_part() -> None:
    policy = joined("sync", 2, training_steps=3)
    send(policy, 0, 1)
    (_, reply) = send(policy, 1, 2, continues=True)  # as after a first part that had NaN in it
    assert reply.outcome is Outcome.DROPPED  # type: ignore[attr-defined]
    send(policy, 1, 1)
    assert (policy.version, policy.seq(0), policy.seq(1)) == (1, 1, 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_saved_goes_on_in_the_middle_of_a_step(mode: str) -> None:
    policy = joined(mode, 2, training_steps=3)
    for part, continues in ((1, False), (2, True), (1, False)):
        for rank in (0, 1):
            send(policy, rank, part, continues)
    other = policy_of(mode, {"training_steps": 3, "num_workers": 2})
    other.restore(policy.version, policy.committed, policy.saved_state())
    for rank in (0, 1):
        other.joined(rank, 0.0)
    assert (other.steps_done(1), other.row(1).part, other.min_steps_done) == (2, 1, 2)
    for rank in (0, 1):
        send(other, rank, 2, continues=True)
    assert (other.steps_done(1), other.row(1).part) == (2, 2)
