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


def config_of(mode: str, num_workers: int, steps: int = 12, **settings: Any) -> Config:
    run = {"mode": mode, "workers": num_workers, "steps": steps, "batch_size": 8, "seed": 3}
    return Config.model_validate(
        {"run": run, "task": TASK, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}, **settings}
    )


def learned(config: Config, **world: Any) -> Simulation:
    num_workers = config.run.workers or 1
    learner = Learner(config, num_workers)
    simulation = Simulation(config, world_of(num_workers, **world), learner=learner)
    simulation.go()
    return simulation


FAILING = {"mtbf_s": 9.0, "back_s": 2.0}


@pytest.mark.parametrize(
    ("mode", "policy", "world"),
    [
        ("sync", {}, {}), ("async", {}, {}), ("buffered", {}, {}),
        ("localsgd", {"local_steps": 3}, {}), ("diloco", {"local_steps": 3}, {}),
        ("async", {}, FAILING), ("async", {"delayed_update": True}, FAILING),
    ],
)  # fmt: skip
def test_a_run_that_learns_decides_as_one_that_does_not(mode: str, policy: dict[str, Any], world: dict) -> None:
    """Also where workers fail with payloads on their way."""
    config = config_of(mode, 3, policy=policy)
    trained, bare = learned(config, **UNEQUAL, **world), Simulation(config, world_of(3, **UNEQUAL, **world))
    bare.go()
    assert trained.tally.digest == bare.tally.digest and bool(bare.tally.num_failures) == bool(world)
    assert trained.learner is not None
    assert trained.learner.model.store.version == trained.policy.version


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
    assert learner.curve[-1].metrics["loss"] == pytest.approx(task.evaluate(model)["loss"], rel=1e-5)


@pytest.mark.parametrize("mode", ["sync", "diloco"])
def test_loss_falls_over_virtual_time(mode: str) -> None:
    simulation = learned(config_of(mode, 2, 60), **UNEQUAL)
    assert simulation.learner is not None
    curve = simulation.learner.curve
    assert 4 <= len(curve) <= 21 and curve[0].elapsed_s == 0.0
    assert [point.elapsed_s for point in curve] == sorted(point.elapsed_s for point in curve)
    assert curve[-1].metrics["loss"] < 0.8 * curve[0].metrics["loss"]


CODED = [
    ("sync", "int8", "raw"), ("sync", "q4", "q4"), ("async", "int8", "bf16"), ("async", "raw", "int8"),
    ("diloco", "sparse", "q4"), ("localsgd", "bf16", "raw"), ("localsgd", "q4", "q4"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "up", "down"), CODED)
def test_codecs_decide_nothing_and_cost_little(mode: str, up: str, down: str) -> None:
    """Of workers that fail as well, whose next process has nothing left over."""
    options = {"policy": {"local_steps": 3}} if mode in ("localsgd", "diloco") else {}
    config = config_of(mode, 3, 60, **options)
    coded = config_of(mode, 3, 60, **options, worker={"codec": up, "reply_codec": down})
    world = {**UNEQUAL, "mtbf_s": 40.0, "back_s": 2.0}
    found, raw = learned(coded, **world), learned(config, **world)
    assert found.tally.digest == raw.tally.digest and found.tally.num_failures
    points = raw.learner.curve[0], found.learner.curve[-1], raw.learner.curve[-1]
    before, loss, plain = (point.metrics["loss"] for point in points)
    assert plain - 1e-3 < loss + 0.05 and loss < 0.9 * before
    assert loss != plain


def test_gradients_in_bf16_are_rounded_and_their_mean_is_taken() -> None:
    """Sync, one step of two workers: the mean of two rounded gradients, by plain torch."""
    config = config_of("sync", 2, 1, worker={"codec": "bf16"})
    learner = learned(config).learner
    assert learner is not None
    task = load_task("xor", ARGS, seed=3, device=torch.device("cpu"))
    torch.manual_seed(3)
    model = task.model()
    shares, mean = Shares(task.train_data(), 8, 3), [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(2):
        rows, _ = next(iter(shares.batches_of(0, 2, rank)))
        model.zero_grad()
        task.loss(model, [tensor[rows] for tensor in shares.dataset.tensors]).backward()  # type: ignore[attr-defined]
        for total, item in zip(mean, model.parameters(), strict=True):
            assert item.grad is not None
            total += item.grad.bfloat16().float() / 2
    layout, weights = learner.model.store.layout, learner.model.store.weights
    views = {spec.name: view for spec, view in layout.views(weights)}
    for (name, item), gradient in zip(model.named_parameters(), mean, strict=True):
        assert torch.allclose(views[name], item.detach() - 0.1 * gradient, rtol=0, atol=1e-7)


def test_the_same_work_alone_stands_beside_it() -> None:
    """Two machines and no links: twice as fast as one that takes their batches one after another, and equal in sync."""
    config, world = config_of("sync", 2), world_of(2, up=math.inf, down=math.inf, latency_s=0.0)
    one_config, one_world = alone(config, world)
    simulation = Simulation(one_config, one_world, learner=Learner(one_config, 1))
    two = Simulation(config, world, learner=Learner(config, 2))
    simulation.go()
    two.go()
    found = json.loads(as_text([("single", simulation), ("sync", two)], simulation))
    finals = found["single"]["summary"]["final"], found["sync"]["summary"]["final"]
    assert (finals[0]["speed-up"], finals[1]["speed-up"]) == (1.0, pytest.approx(2.0))
    assert finals[0]["loss"] == pytest.approx(finals[1]["loss"], rel=1e-5)
    assert sum(worker["samples"] for worker in found["single"]["summary"]["workers"]) == 2 * 12 * 8


@pytest.mark.parametrize(
    ("mode", "settings", "problem"),
    [
        ("sync", {"worker": {"codec": "q2"}}, "worker.codec is q2, and the optimizer is SGD"),
        ("sync", {"store": {"max_norm": 1.0}}, "store.max_norm is 1.0"),
        ("sync", {"train": {"accumulate": 2}}, "train.accumulate is 2"),
        ("sync", {"task": {"name": "nothing.py:Task"}}, "nothing.py"),
        (
            "async",
            {"worker": {"codec": "int8"}, "policy": {"delayed_update": True}},
            "policy.delayed_update with worker.codec int8",
        ),
    ],
)
def test_what_cannot_be_learned_is_said(mode: str, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Learner(config_of(mode, 2, **settings), 2)


def test_too_many_workers_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UsageError, match=r"1,000,000,000 workers .* the limit is"):
        Learner(config_of("sync", 2), 1_000_000_000)
