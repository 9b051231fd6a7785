"""async_diloco whose workers go on during exchanges: policy, store, workers' own parts against plain torch, by a clock.

Every delta is a round (quorum 1, no window), and its reply is here at once; it is taken after tau local steps.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch

from paramserver.ps.engine.modes import policy_of
from paramserver.tests.numeric.test_async_diloco_equals_reference import replied
from paramserver.tests.numeric.test_diloco_equals_reference import (
    INNER,
    Overlapping,
    assert_equal,
    local_step,
    make_model,
    store_of,
)
from paramserver.tests.numeric.test_diloco_equals_reference import THREE as SIZES
from paramserver.worker.session import Progress

from ..records import contribution_of, reply_of

H, STEPS, LR = 8, 44, 0.8
SECONDS = (1.0, 1.125, 2.875)  # of each worker's step
RANKS = range(len(SIZES))


def reference(tau: int, even_pace: bool) -> torch.Tensor:
    """Nothing of ours. How many steps a worker is told counts for those after the ones that it takes already."""
    models = [make_model() for _ in RANKS]
    inner = [INNER["adamw"](model) for model in models]
    theta = torch.nn.utils.parameters_to_vector(models[0].parameters()).detach()
    local, anchor, sent, given = ([theta.clone() for _ in RANKS] for _ in range(4))
    done, local_steps, taken, since = [0] * 3, [H] * 3, [H] * 3, [0.0] * 3
    due = {rank: H * SECONDS[rank] for rank in RANKS}
    speed: dict[int, float] = {}
    newest: dict[int, float] = {}
    while due:
        now, rank = min((at, rank) for rank, at in due.items())
        for step in range(done[rank], done[rank] + taken[rank]):
            torch.nn.utils.vector_to_parameters(local[rank].clone(), models[rank].parameters())
            local_step(models[rank], inner[rank], rank, SIZES[rank], step)
            local[rank] = torch.nn.utils.parameters_to_vector(models[rank].parameters()).detach().clone()
            if done[rank] and step + 1 - done[rank] == min(tau, taken[rank]):
                local[rank] = given[rank] + (local[rank] - sent[rank])
                anchor[rank] = given[rank]
        done[rank] += taken[rank]
        speed[rank] = (speed.get(rank, taken[rank] / (now - since[rank])) + taken[rank] / (now - since[rank])) / 2
        newest[rank] = (taken[rank] * SIZES[rank]) ** 2 / taken[rank]
        missing = sum(done[item] < STEPS for item in RANKS if item != rank)
        known = [weight for item, weight in newest.items() if item == rank or done[item] < STEPS]
        share = newest[rank] / (sum(known) / len(known) * (1 + missing)) if missing else 1.0
        theta = theta - LR * min(1.0, share) * (anchor[rank] - local[rank])
        sent[rank], given[rank], since[rank] = local[rank].clone(), theta, now
        # What follows was told with the reply before this one's; with this one what comes after that.
        taken[rank] = min(local_steps[rank], STEPS - done[rank])
        local_steps[rank] = max(1, ceil(H * (speed[rank] / max(speed.values())))) if even_pace else H
        due[rank] = now + taken[rank] * SECONDS[rank]
        if not taken[rank]:
            del due[rank]
    return theta


def ours(tau: int, **options: Any) -> tuple[torch.Tensor, dict[int, list[int]]]:
    """The weights, and of each rank the local steps of its contributions."""
    settings = {"training_steps": STEPS, "num_workers": len(SIZES), "local_steps": H, "grace": 0.0, "outer_lr": LR}
    overlap = {"delayed_update": True, "overlap_steps": tau}
    policy = policy_of("async_diloco", settings | overlap | options)
    assert policy.overlap_steps == tau
    workers = [Overlapping(1) for _ in SIZES]
    store = store_of(workers[0], policy)
    progress = [Progress(total_steps=STEPS) for _ in RANKS]
    replies: dict[int, tuple[int, int]] = {}  # version, local steps
    contributions: dict[int, list[int]] = {rank: [] for rank in RANKS}

    def perform(decisions: list[Any], staged: torch.Tensor | None = None) -> None:
        for rank in replied(decisions, policy, store, staged):
            workers[rank].receive(store.weights)
            replies[rank] = policy.version, policy.next_local_steps(rank)

    for rank in RANKS:
        perform(policy.joined(rank, 0.0))
    due = {}
    for rank in RANKS:
        progress[rank].replied(reply_of(0, *replies.pop(rank)))
        due[rank] = progress[rank].local_steps * SECONDS[rank]
    while due:
        now, rank = min((at, rank) for rank, at in due.items())
        worker, mine = workers[rank], progress[rank]
        steps, begin = mine.local_steps, mine.row.steps
        for step in range(begin, begin + steps):
            local_step(worker.model, worker.optimizer, rank, SIZES[rank], step)
            if begin and step + 1 - begin == min(tau, steps):
                worker.merge()
        version, hears = replies.pop(rank, (0, steps))  # what `DelayedUpdate` does with it
        staged = worker.delta()
        contribution = contribution_of(len(contributions[rank]) + 1, version, steps * SIZES[rank], steps)
        contributions[rank].append(steps)
        perform(policy.contributed(rank, contribution, now), staged)
        del due[rank]
        if not mine.assume_counted(hears):
            due[rank] = now + mine.local_steps * SECONDS[rank]
        assert policy.steps_done(rank) == mine.row.steps
    assert [policy.committed[rank].steps for rank in RANKS] == [STEPS] * len(RANKS)
    return torch.cat([view.reshape(-1) for _, view in store.layout.views(store.weights)]), contributions


@pytest.mark.parametrize("tau", [1, 3, 8])
@pytest.mark.parametrize("even_pace", [True, False])
def test_it_equals_an_independent_reference(tau: int, even_pace: bool) -> None:
    found, contributions = ours(tau, even_pace=even_pace)
    assert_equal(found, reference(tau, even_pace), 1e-12)
    assert all(sum(steps) == STEPS for steps in contributions.values())
    if even_pace:
        assert contributions[2][:3] == [H, H, 3], "told after the first, taken from the third on"
    else:
        assert contributions == {rank: [8, 8, 8, 8, 8, 4] for rank in RANKS}
