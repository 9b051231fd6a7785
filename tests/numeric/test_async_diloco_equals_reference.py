"""async_diloco does what its rule says: policy, store and anchors against a few lines of plain torch, by one clock."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paramserver.common.tensors.optimizers import DelayedNesterov
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Fold, Policy, Reply
from paramserver.ps.tensors.store import Step, Store
from paramserver.tests.numeric.test_diloco_equals_reference import (
    INNER,
    Worker,
    assert_equal,
    local_step,
    make_model,
    store_of,
)

from ..records import contribution_of

H, STEPS, SIZES, LR = 4, 18, (4, 2, 3), 0.8
SECONDS = (1.0, 1.125, 2.875)  # of each worker's step


def reference(
    quorum: int, grace: float, even_pace: bool, mu: float = 0.0, delay: int = 1, part: float = 0.0
) -> torch.Tensor:
    """Nothing of ours. A delta that comes at the moment at which a round closes is in it."""
    ranks = range(len(SIZES))
    models = [make_model() for _ in ranks]
    inner = [INNER["adamw"](model) for model in models]
    theta = nn.utils.parameters_to_vector(models[0].parameters()).detach()
    start, local_steps, done, began = (
        [theta for _ in ranks], [H for _ in ranks], [0 for _ in ranks], [0.0 for _ in ranks],
    )  # fmt: skip
    due = {rank: H * SECONDS[rank] for rank in ranks}
    speed, newest, took, delta = {}, {}, {}, {}  # by rank; the last two of the round
    opened = closes = inf
    momentum, moved, num = torch.zeros_like(theta), torch.zeros_like(theta), 0  # delayed Nesterov's
    while due or delta:
        now, rank = min(((at, rank) for rank, at in due.items()), default=(inf, -1))
        now = min(now, closes)
        if due.get(rank) == now:
            del due[rank]
            nn.utils.vector_to_parameters(start[rank].clone(), models[rank].parameters())
            for step in range(done[rank], done[rank] + local_steps[rank]):
                local_step(models[rank], inner[rank], rank, SIZES[rank], step)
            delta[rank] = start[rank] - nn.utils.parameters_to_vector(models[rank].parameters()).detach()
            done[rank] += local_steps[rank]
            newest[rank] = (local_steps[rank] * SIZES[rank]) ** 2 / local_steps[rank]
            took[rank] = now - began[rank]
            speed[rank] = (speed.get(rank, local_steps[rank] / took[rank]) + local_steps[rank] / took[rank]) / 2
            opened = min(opened, now)
            if len(delta) == quorum:
                closes = now + max(0.0, grace * (sum(took.values()) / len(took) - (now - opened)))
        if due and now < closes:
            continue
        known = [newest[value] for value in newest if done[value] < STEPS or value in delta]
        all_of_them = sum(known) / len(known) * (len(delta) + len(due))
        change = torch.zeros_like(theta)
        for item, each in delta.items():
            change = change + newest[item] / (all_of_them if due else sum(newest[two] for two in delta)) * each
        moved, taken = moved + change, part * len(delta)
        if num + len(delta) >= delay:
            momentum, taken = mu * momentum + moved, 1 - part * num
            moved, num = torch.zeros_like(theta), -len(delta)
        num += len(delta)
        theta = theta - LR * (taken * mu * momentum + change)
        for item in delta:
            start[item], began[item], local_steps[item] = theta, now, min(H, STEPS - done[item])
            if even_pace:
                local_steps[item] = min(local_steps[item], max(1, ceil(H * (speed[item] / max(speed.values())))))
            if local_steps[item]:
                due[item] = now + local_steps[item] * SECONDS[item]
        opened, closes, took, delta = inf, inf, {}, {}
    return theta


def replied(decisions: list[Any], policy: Policy, store: Store, staged: torch.Tensor | None) -> Iterator[int]:
    """Carry out decisions; yields the ranks that get a reply."""
    for decision in decisions:
        if isinstance(decision, Fold):
            store.fold(staged, decision.weight, decision.rank)
        elif isinstance(decision, Commit):
            numbers = policy.outer.arguments | (decision.numbers or {})
            store.commit(Step(3, 0, [numbers], lr_scale=decision.lr_scale))
        elif isinstance(decision, Reply):
            yield decision.rank


def ours(**options: Any) -> tuple[torch.Tensor, dict[int, list[int]]]:
    """The weights, and of each rank the local steps of its contributions."""
    policy = policy_of("async_diloco", {"training_steps": STEPS, "num_workers": 3, "local_steps": H, **options})
    workers = [Worker("adamw") for _ in SIZES]
    store = store_of(workers[0], policy)
    base, local_steps, due = {}, {0: [], 1: [], 2: []}, {}

    def perform(decisions: list[Any], now: float, staged: torch.Tensor | None = None) -> None:
        for rank in replied(decisions, policy, store, staged):
            workers[rank].receive(store.weights)
            base[rank] = policy.version
            if steps := policy.next_local_steps(rank):
                local_steps[rank].append(steps)
                due[rank] = now + steps * SECONDS[rank]

    for rank in range(3):
        perform(policy.joined(rank, 0.0), 0.0)
    while due:
        now, rank = min((at, rank) for rank, at in due.items())
        if policy._round and len(policy._round) >= policy.options.quorum and policy._closes_at < now:
            perform(policy.tick(policy._closes_at), policy._closes_at)
            continue
        del due[rank]
        done, steps = policy.steps_done(rank), local_steps[rank][-1]
        for step in range(done, done + steps):
            local_step(workers[rank].model, workers[rank].optimizer, rank, SIZES[rank], step)
        contribution = contribution_of(len(local_steps[rank]), base[rank], steps * SIZES[rank], steps)
        perform(policy.contributed(rank, contribution, now), now, workers[rank].delta())
        assert policy.min_steps_done == min(map(policy.steps_done, range(3)))
    assert not policy._round, "what is there is in the weights"
    assert [policy.committed[rank].steps for rank in range(3)] == [STEPS] * 3
    return torch.cat([view.reshape(-1) for _, view in store.layout.views(store.weights)]), local_steps


@pytest.mark.parametrize(("quorum", "grace"), [(1, 0.0), (1, 0.25), (2, 0.5)])
@pytest.mark.parametrize("even_pace", [True, False])
def test_it_equals_an_independent_reference(quorum: int, grace: float, even_pace: bool) -> None:
    found, local_steps = ours(quorum=quorum, grace=grace, even_pace=even_pace, outer_lr=LR)
    assert_equal(found, reference(quorum, grace, even_pace), 1e-12)
    assert all(sum(steps) == STEPS for steps in local_steps.values())
    if even_pace:
        assert local_steps[2][1] == 2 and local_steps[0][1] == H, "a worker 2.9 times as slow"
    else:
        assert local_steps == {rank: [4, 4, 4, 4, 2] for rank in range(3)}


@pytest.mark.parametrize(("delay", "part"), [(1, 0.0), (1, 1.0), (3, 0.0), (3, 0.25), (4, 0.25)])
@pytest.mark.parametrize("quorum", [1, 2])
def test_delayed_nesterov_equals_an_independent_reference(quorum: int, delay: int, part: float) -> None:
    settings = {"outer_momentum": 0.7, "outer_delay": delay, "outer_delay_part": part}
    found, _ = ours(quorum=quorum, grace=0.25, outer_lr=LR, **settings)
    expected = reference(quorum, 0.25, True, 0.7, delay, part)
    assert_equal(found, expected, 1e-12)
    assert (expected - reference(quorum, 0.25, True)).abs().max() > 1e-3, "the momentum is seen"


def test_delayed_nesterov_is_the_papers_where_deltas_come_one_by_one() -> None:
    """Algorithm 3 of arXiv:2401.09135 with N workers of one weight, in numpy; and torch's Nesterov where N is 1."""
    rng = np.random.default_rng(0)
    mu, n, lr = 0.9, 4, 0.3
    for c in (0.0, 0.1, 0.25):
        theta, m, acc = np.zeros(5), np.zeros(5), np.zeros(5)
        weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = DelayedNesterov([weight], lr=lr, momentum=mu)
        policy = policy_of("async_diloco", {"outer_momentum": mu, "outer_delay": n, "outer_delay_part": c})
        for arrival in range(1, 18):
            delta = rng.normal(size=5)
            acc = acc + delta
            if arrival % n == 0:
                m = mu * m + acc / n
                theta, acc = theta - lr * ((1 - c * n + c) * mu * m + delta / n), np.zeros(5)
            else:
                theta = theta - lr * (c * mu * m + delta / n)
            optimizer.param_groups[0].update(policy._nesterov(1, 1 / n, n))
            weight.grad = torch.from_numpy(delta)
            optimizer.step()
            assert np.allclose(weight.detach().numpy(), theta, rtol=0, atol=1e-13)
    item, two = (nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))
    ours, torchs = DelayedNesterov([item], lr, mu), torch.optim.SGD([two], lr, mu, nesterov=True)
    for _ in range(9):
        item.grad = torch.from_numpy(rng.normal(size=5))
        two.grad = item.grad.clone()
        ours.step(), torchs.step()
    assert torch.allclose(item, two, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_delay": 0, "outer_momentum": 0.5}, "greater than or equal to 1"),
        ({"outer_delay": 4, "outer_momentum": 0.0}, "policy.outer_delay is 4 and policy.outer_momentum 0"),
        ({"outer_delay": 4, "outer_momentum": 0.5, "outer_delay_part": 0.3}, "all of them together at most 1"),
        ({"outer_delay_part": 0.1}, "policy.outer_delay none"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(Exception, match=message):
        policy_of("async_diloco", settings)
