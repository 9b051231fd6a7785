"""The linear task: training finds w*, and the metrics are those of the formulas."""

from __future__ import annotations

import pytest
import torch

from paramserver.worker.tasks.linear import Linear


def test_training_recovers_the_weights():
    task = Linear(num_outputs=2)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in zip(*(tensor.split(32) for tensor in task.train_data().tensors), strict=True):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    metrics = task.evaluate(model)
    assert metrics["weight_error"] < 0.01
    assert metrics["loss"] == pytest.approx(0.1**2, rel=0.3)


def test_with_w_star_the_weight_error_is_zero_and_the_loss_is_the_noise():
    task = Linear(num_features=7, noise=0.5)
    model = task.model()
    with torch.no_grad():
        model.weight.copy_(task.w_star.T)
    metrics = task.evaluate(model)
    assert metrics["weight_error"] == 0
    assert metrics["loss"] == pytest.approx(0.5**2, rel=0.1)
    with torch.no_grad():
        model.weight.mul_(1.25)
    assert task.evaluate(model)["weight_error"] == pytest.approx(0.25, rel=1e-5)


def test_without_noise_the_data_are_exact():
    task = Linear(num_features=3, num_samples=50, noise=0)
    x, y = task.train_data().tensors
    assert torch.equal(y, x @ task.w_star)


def test_data_are_made_on_the_given_device():
    task = Linear(device=torch.device("meta"))
    assert {tensor.device.type for tensor in task.train_data().tensors} == {"meta"}
