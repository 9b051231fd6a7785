"""The rules for late gradients, each against its paper's formula in a few lines of its own."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Run
from paramserver.ps.core.state import Options
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Fold, Policy
from paramserver.ps.policies.dssp import most_useful
from paramserver.ps.policies.shared.late import momentum_left
from paramserver.ps.tensors.store import Step, Store

from ...records import contributed, contribution_of, joined


def commit_of(policy: Policy, rank: int, base_version: int, now: float = 0.0) -> Commit:
    contribution = contribution_of(policy.seq(rank) + 1, base_version)
    decisions = policy.contributed(rank, contribution, now)
    return next(decision for decision in decisions if isinstance(decision, Commit))


@pytest.mark.parametrize(("rule", "formula"), [
    ("inverse", lambda tau: 1 / tau if tau else 1.0),  # Zhang et al. 2016
    ("polynomial", lambda tau: 1 / math.sqrt(1 + tau)),  # Xie et al. 2019, a = 1/2
])  # fmt: skip
@pytest.mark.parametrize("mode", ["async", "ssp", "dssp"])
def test_the_rate_of_a_late_gradient(mode: str, rule: str, formula: Any) -> None:
    policy = joined(mode, 2, late_scale=rule, staleness=20, staleness_most=20)
    for tau in range(8):
        assert commit_of(policy, 0, policy.version - tau).lr_scale == pytest.approx(formula(tau))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16])
def test_momentum_that_is_left(momentum: float, num_workers: int) -> None:
    """What N workers are by themselves, 1 - 1/N, and what is left act together as what was asked for: 1 - (1 - 1/N)
    = 1/N of the rate reaches a step, and (1 - left) / N is 1 - momentum, where that can be had."""
    left = momentum_left(momentum, num_workers)
    if (1 - momentum) * num_workers <= 1:
        assert (1 - left) / num_workers == pytest.approx(1 - momentum)
    else:
        assert left == 0


ONE_BY_ONE = pytest.mark.parametrize("mode", ["async", "ssp", "dssp"])


@ONE_BY_ONE
def test_less_momentum_is_left_the_more_workers_are_live(mode: str) -> None:
    policy = joined(mode, 4)
    assert commit_of(policy, 0, 0).momentum_among == 4
    policy.left(3, 0.0)
    assert commit_of(policy, 0, 0).momentum_among == 3
    assert commit_of(joined(mode, 4, late_momentum=False), 0, 0).momentum_among == 1
    assert commit_of(joined(mode, 1), 0, 0).momentum_among == 1


@ONE_BY_ONE
def test_workers_that_have_taken_all_steps_are_no_delay(mode: str) -> None:
    """They are live until the run ends; the last contribution of each still came beside the others."""
    policy = joined(mode, 3, training_steps=2)
    found = [commit_of(policy, rank, policy.version).momentum_among for rank in (0, 1, 0, 1, 2, 2)]
    assert found == [3, 3, 3, 2, 1, 1] and len(policy.members) == 3
    many = joined(mode, 12, training_steps=1)
    assert [commit_of(many, rank, 0).lr_scale < 1 for rank in range(12)] == [False] + [True] * 3 + [False] * 8


@ONE_BY_ONE
def test_with_many_workers_late_gradients_count_less_unless_somebody_says_otherwise(mode: str) -> None:
    """By the number that are live, where less momentum is used; one word turns either off."""
    policy = joined(mode, 9)
    assert policy.may_scale and commit_of(policy, 0, 0).lr_scale == 1.0
    assert commit_of(policy, 1, 0).lr_scale == pytest.approx(2**-0.5)
    policy.left(8, 0.0)
    assert commit_of(policy, 2, 0).lr_scale == 1.0
    assert not joined(mode, 8).may_scale
    for options in ({"late_scale": "none"}, {"late_momentum": False}):
        policy = joined(mode, 9, **options)
        assert [commit_of(policy, rank, 0).lr_scale for rank in range(3)] == [1.0] * 3
    assert json.dumps(policy.full_state())  # shards compare it


CURVATURE = torch.tensor([1.0, 0.3], dtype=torch.float64)  # of a loss, 0.5 sum(curvature * weights^2)
LR, MOMENTUM, ROUNDS = 0.05, 0.9, 40


def plain(num_workers: int) -> torch.Tensor:
    """Weights after N workers have taken turns, each on what it got one round ago. Without paramserver: SGD's own
    formula, of its momentum what Mitliagkas et al. leave, and beyond 8 workers FedAsync's (1 + tau)^-1/2."""
    weights, velocity = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    had, made = [(0, weights.clone())] * num_workers, 0
    for _ in range(ROUNDS):
        for rank in range(num_workers):
            version, base = had[rank]
            rate = LR * (1 + made - version) ** -0.5 if num_workers > 8 else LR
            velocity = max(0.0, 1 - num_workers * (1 - MOMENTUM)) * velocity + CURVATURE * base
            weights, made = weights - rate * velocity, made + 1
            had[rank] = made, weights.clone()
    return weights


@ONE_BY_ONE
@pytest.mark.parametrize("num_workers", [1, 4, 12])
def test_what_workers_that_take_turns_end_with_is_what_the_papers_say(mode: str, num_workers: int) -> None:
    """The mode's decisions, carried out by the server's own store."""
    payload = torch.ones(2, dtype=torch.float64)
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float64", (2,))])
    spec = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": LR, "momentum": MOMENTUM}),))
    store, policy = Store(layout, payload.view(torch.uint8), spec), joined(mode, num_workers)
    had = [(0, store.tensors()["w"])] * num_workers
    for _ in range(ROUNDS):
        for rank in range(num_workers):
            version, base = had[rank]
            commit = commit_of(policy, rank, version)
            store.fold((CURVATURE * base).view(torch.uint8), 1.0, rank)
            store.commit(Step(num_workers, 0, lr_scale=commit.lr_scale, momentum_among=commit.momentum_among))
            had[rank] = policy.version, store.tensors()["w"]
    assert torch.allclose(store.tensors()["w"], plain(num_workers), rtol=1e-9, atol=1e-12)
    assert store.tensors()["w"].norm() < 1.0, "it has learned"


@ONE_BY_ONE
def test_the_run_says_which_momentum_is_left_when_that_changes(mode: str) -> None:
    run = Run(Options(mode=mode), policy_of(mode, {}), "run")
    recorded: list[dict[str, Any]] = []

    def happens(event: events.Event) -> None:
        for effect in run.apply(event):
            if isinstance(effect, effects.Log) and effect.event == "momentum":
                recorded.append(effect.fields)
            if isinstance(effect, effects.Commit):
                assert effect.momentum_among == len(run.policy.members)

    groups = ({"lr": 0.1, "momentum": 0.9},)
    for rank in range(3):
        happens(events.Joined(rank, rank))
        happens(events.Offered(rank, 1, "model", "sgd"))
        if not rank:
            happens(events.Brought(0, 1))
        for _ in range(2):
            number = run.policy.seq(rank) + 1
            happens(contributed(rank, 1, number, run.policy.version, hyperparameters=groups))
    assert [(event["workers"], event["configured"], event["used"]) for event in recorded] == [
        (2, 0.9, 0.8),
        (3, 0.9, 0.7),
    ]


# ---- buffered ----------------------------------------------------------------------------------


@given(late=st.lists(st.integers(0, 5), min_size=12, max_size=12), size=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_buffers_step_is_fedbuffs(late: list[int], size: int) -> None:
    """The step, mean times rate, is 1/K of the sum of s g; g is one number for each contribution."""
    policy = joined("buffered", 3, buffer=size)
    folds: list[tuple[float, float]] = []  # weight, g
    expected = 0.0
    for index, tau in enumerate(late):
        rank, gradient, base = index % 3, float(index + 1) ** 2, max(0, policy.version - tau)
        staleness = policy.version - base
        contribution = contribution_of(policy.seq(rank) + 1, base)
        expected += gradient / math.sqrt(1 + staleness)
        for decision in policy.contributed(rank, contribution, 0.0):
            if isinstance(decision, Fold):
                folds.append((decision.weight, gradient))
            if isinstance(decision, Commit):
                mean = sum(weight * g for weight, g in folds) / sum(weight for weight, _ in folds)
                assert mean * decision.lr_scale == pytest.approx(expected / size)
                folds, expected = [], 0.0
    assert policy.version == len(late) // size


def test_whoever_ends_last_makes_the_last_step_also_where_scripts_say_when_they_end() -> None:
    policy = joined("buffered", 2, training_steps=None, buffer=4)
    for rank in (0, 1, 1):
        policy.contributed(rank, contribution_of(policy.seq(rank) + 1, 0), 0.0)
    assert not any(isinstance(decision, Commit) for decision in policy.finished(0, 0.0))
    (commit,) = policy.finished(1, 0.0)
    assert commit.ranks == (0, 1, 1)


# ---- dssp --------------------------------------------------------------------------------------


def by_trying(mine: float, my_interval: float, other: float, interval: float, most: int) -> int:
    """All of the fastest worker's next times against all of the slowest's."""
    nearest = [
        min(abs(other + (k + 1) * interval - (mine + more * my_interval)) for k in range(200))
        for more in range(most + 1)
    ]
    return nearest.index(min(nearest))


@given(
    mine=st.integers(0, 40), my_interval=st.integers(1, 20), other=st.integers(0, 40), interval=st.integers(1, 60),
    most=st.integers(0, 12),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_number_of_contributions_more_is_the_papers(
    mine: int, my_interval: int, other: int, interval: int, most: int
) -> None:
    # Eighths are exact, so that of several that are as near both find the same.
    times = [value / 8 for value in (mine, my_interval, other, interval)]
    assert most_useful(*times, most) == by_trying(*times, most)


def test_dssp_without_room_is_ssp() -> None:
    """The same events, the same decisions."""
    dssp, ssp = joined("dssp", 2, staleness=2, staleness_most=2), joined("ssp", 2, staleness=2)
    for now, rank in enumerate([0, 0, 1, 0, 0, 1, 1, 0, 1, 0]):
        number = ssp.seq(rank) + 1
        contribution = contribution_of(number, ssp.version)
        assert dssp.contributed(rank, contribution, float(now)) == ssp.contributed(rank, contribution, float(now))
