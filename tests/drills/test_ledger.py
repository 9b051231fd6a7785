"""The task `ledger`: its weights say which samples were applied, and how often."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.drills.tasks.ledger import Ledger, LedgerModel
from paramserver.worker.training.data import Shares, sharded_batches

WORKERS, BATCH, STEPS = 3, 4, 8
SAMPLES = WORKERS * BATCH * STEPS


def gradients(task: Ledger, model: LedgerModel, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.item() == 0
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def contributions(task: Ledger, model: LedgerModel) -> list[list[dict[str, torch.Tensor]]]:
    """[rank][step]: the gradients of one epoch, all computed on `model`."""
    found = []
    for rank in range(WORKERS):
        batches = sharded_batches(Shares(task.train_data(), BATCH, 0), lambda rank=rank: (WORKERS, rank), 0)
        found.append([gradients(task, model, next(batches)[0]) for _ in range(STEPS)])
    return found


def apply(model: LedgerModel, gradient: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= gradient[name]


@pytest.fixture
def task() -> Ledger:
    return Ledger(samples=SAMPLES, padding_bytes=64)


def test_an_epoch_applies_every_sample_once(task: Ledger) -> None:
    model = task.model()
    for steps in zip(*contributions(task, model), strict=True):
        for gradient in steps:
            apply(model, gradient)
    assert torch.equal(model.applied, torch.ones(SAMPLES))
    assert torch.equal(model.clock, torch.full((16,), float(WORKERS * STEPS)))
    metrics = task.evaluate(model)
    assert metrics == {
        "loss": 0, "missing": 0, "repeated": 0, "applied": SAMPLES, "clock": WORKERS * STEPS, "torn": 0,
    }  # fmt: skip


def test_a_lost_contribution_and_a_repeated_one_are_seen(task: Ledger) -> None:
    model = task.model()
    first, *others = contributions(task, model)
    for gradient in [*first[1:], first[1], *(gradient for steps in others for gradient in steps)]:
        apply(model, gradient)
    metrics = task.evaluate(model)
    assert (metrics["missing"], metrics["repeated"]) == (BATCH, BATCH)
    assert metrics["loss"] == pytest.approx(2 * BATCH / SAMPLES)


def test_weights_of_two_versions_are_seen_and_not_forgotten(task: Ledger) -> None:
    model = task.model()
    batch, _ = next(sharded_batches(Shares(task.train_data(), BATCH, 0), lambda: (1, 0), 0))
    with torch.no_grad():
        model.clock[8:] += 1  # read from a newer version
    gradient = gradients(task, model, batch)
    whole = task.model()
    apply(whole, gradient)
    assert task.evaluate(whole)["torn"] == 1


@pytest.mark.parametrize("args", [{"samples": 0}, {"samples": 1.5}, {"padding_bytes": 7}])
def test_wrong_arguments_are_named(args: dict) -> None:
    with pytest.raises(UsageError, match=f"task.args.{next(iter(args))}"):
        Ledger(**args)
