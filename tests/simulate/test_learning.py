"""Runs that learn under the virtual clock: real gradients, the same decisions, and sync is plain torch."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from paramserver.common.config.schema import Config
from paramserver.common.errors import UsageError
from paramserver.common.tensors.optimizers import plain_step, without_compiler
from paramserver.simulate.learning.learner import Learner
from paramserver.simulate.plan import alone
from paramserver.simulate.results.summary import as_text
from paramserver.simulate.run.simulation import Simulation
from paramserver.tests.simulate.worlds import world_of
from paramserver.worker.training.data import Shares
from paramserver.worker.training.tasks.loading import load_task

ARGS = {"d": 4, "num_samples": 240}
TASK = {"name": "xor", "args": ARGS}
UNEQUAL = {"speeds": (1.0, 0.6, 0.3), "jitter": 0.3}


def config_of(mode: str, num_workers: int, steps: int = 12, **told: Any) -> Config:
    run = {"mode": mode, "workers": num_workers, "steps": steps, "batch_size": 8, "seed": 3}
    return Config.model_validate(
        {"run": run, "task": TASK, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}, **told}
    )


def learned(config: Config, **world: Any) -> Simulation:
    num_workers = config.run.workers or 1
    learner = Learner(config, num_workers)
    simulation = Simulation(config, world_of(num_workers, **world), learner=learner)
    simulation.go()
    return simulation


MODES = ("sync", "async", "localsgd", "diloco", "buffered")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_learns_decides_as_one_that_does_not(mode: str) -> None:
    config = config_of(mode, 3, policy={"local_steps": 3} if mode in ("localsgd", "diloco") else {})
    told = learned(config, **UNEQUAL)
    bare = Simulation(config, world_of(3, **UNEQUAL))
    bare.go()
    assert told.tally.digest == bare.tally.digest
    assert told.learner is not None
    assert told.learner.model.store.version == told.policy.version


@pytest.mark.parametrize("pipelined", [False, True])
def test_workers_that_fail_and_bodies_on_their_way_change_no_decision(pipelined: bool) -> None:
    config = config_of("async", 3, policy={"pipelined": pipelined})
    world = {**UNEQUAL, "mtbf_s": 9.0, "back_s": 2.0}
    bare = Simulation(config, world_of(3, **world))
    bare.go()
    assert bare.tally.num_failures and learned(config, **world).tally.digest == bare.tally.digest


def test_sync_is_one_plain_process_on_the_union_batch() -> None:
    config = config_of("sync", 3)
    learner = learned(config).learner
    assert learner is not None
    task = load_task("xor", ARGS, seed=3, device=torch.device("cpu"))
    without_compiler()
    torch.manual_seed(3)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    shares = Shares(task.train_data(), 24, 3)
    batches = [rows for epoch in range(2) for rows, _ in shares.batches_of(epoch, 1, 0)]
    for rows in batches[:12]:
        model.zero_grad()
        task.loss(model, [tensor[rows] for tensor in shares.dataset.tensors]).backward()  # type: ignore[attr-defined]
        plain_step(torch.optim.SGD)(optimizer)
    assert learner.figures()["loss"] == pytest.approx(task.evaluate(model)["loss"], rel=1e-5)


@pytest.mark.parametrize("mode", ["sync", "diloco"])
def test_loss_falls_over_virtual_time(mode: str) -> None:
    simulation = learned(config_of(mode, 2, 60), **UNEQUAL)
    assert simulation.learner is not None
    curve = simulation.learner.curve
    assert 4 <= len(curve) <= 21 and curve[0].elapsed_s == 0.0
    assert [point.elapsed_s for point in curve] == sorted(point.elapsed_s for point in curve)
    assert curve[-1].figures["loss"] < 0.8 * curve[0].figures["loss"]


def test_the_same_work_alone_stands_beside_it() -> None:
    """Two machines and no links: twice as fast as one that takes their batches one after another, and equal in sync."""
    config, world = config_of("sync", 2), world_of(2, up=math.inf, down=math.inf, latency_s=0.0)
    one_config, one_world = alone(config, world)
    one = Simulation(one_config, one_world, learner=Learner(one_config, 1))
    two = Simulation(config, world, learner=Learner(config, 2))
    one.go()
    two.go()
    found = json.loads(as_text([("single", one), ("sync", two)], one))
    finals = found["single"]["summary"]["final"], found["sync"]["summary"]["final"]
    assert (finals[0]["speed-up"], finals[1]["speed-up"]) == (1.0, pytest.approx(2.0))
    assert finals[0]["loss"] == pytest.approx(finals[1]["loss"], rel=1e-5)
    assert sum(worker["samples"] for worker in found["single"]["summary"]["workers"]) == 2 * 12 * 8


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"worker": {"codec": "int8"}}, "worker.codec is int8"),
        ({"store": {"max_norm": 1.0}}, "store.max_norm is 1.0"),
        ({"train": {"accumulate": 2}}, "train.accumulate is 2"),
        ({"task": {"name": "nothing.py:Task"}}, "nothing.py"),
    ],
)
def test_what_cannot_be_learned_is_said(told: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Learner(config_of("sync", 2, **told), 2)


def test_too_many_workers_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UsageError, match=r"1,000,000,000 workers .* the most"):
        Learner(config_of("sync", 2), 1_000_000_000)
