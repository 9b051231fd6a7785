"""The learning rates of tasks are those of torch's schedulers."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from paramserver.common.config.schema import Config, TrainConfig
from paramserver.worker.training.tasks.schedule import rate_at


def schedulers(optimizer: torch.optim.Optimizer, train: TrainConfig, num_steps: int, lr: float) -> LRScheduler:
    left = num_steps - train.warmup
    match train.lr_schedule:
        case "cosine":
            then: LRScheduler = CosineAnnealingLR(optimizer, T_max=left, eta_min=train.min_lr)
        case "linear":
            then = LinearLR(optimizer, start_factor=1.0, end_factor=train.min_lr / lr, total_iters=left)
        case "step":
            then = StepLR(optimizer, step_size=train.lr_step_size, gamma=train.lr_gamma)
        case _:
            then = ConstantLR(optimizer, factor=1.0, total_iters=1)
    if not train.warmup:
        return then
    first = LinearLR(optimizer, start_factor=1 / (train.warmup + 1), total_iters=train.warmup)
    return SequentialLR(optimizer, [first, then], milestones=[train.warmup])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_every_rate_is_torchs(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["constant", "cosine", "linear", "step"]))
    num_steps, lr = data.draw(st.integers(1, 60)), data.draw(st.floats(1e-4, 2.0))
    options = {"lr_schedule": kind, "warmup": data.draw(st.integers(0, num_steps - 1))}
    if kind == "step":
        options |= {"lr_step_size": data.draw(st.integers(1, 20)), "lr_gamma": data.draw(st.floats(0.05, 1))}
    elif kind != "constant":
        options["min_lr"] = data.draw(st.floats(0, lr))
    train = TrainConfig(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about SequentialLR
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        scheduler = schedulers(optimizer, train, num_steps, lr)
        for step in range(num_steps):
            # Torch multiplies its way from one rate to the next, which adds up rounding.
            assert rate_at(step, num_steps, lr, train) == pytest.approx(optimizer.param_groups[0]["lr"], abs=lr * 1e-9)
            optimizer.step()
            scheduler.step()


def test_a_configuration_that_was_read_is_one_that_can_be_read() -> None:
    config = Config(train={"lr_schedule": "cosine"})
    assert Config.model_validate(config.model_dump()) == config  # as shards tell each other


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"lr_schedule": "step"}, "lr_schedule step and lr_step_size need each other"),
        ({"lr_step_size": 5}, "lr_schedule step and lr_step_size need each other"),
        ({"lr_gamma": 0.5}, "lr_gamma needs lr_schedule step"),
        ({"min_lr": 0.01}, "min_lr needs lr_schedule cosine or linear"),
        ({"warmup": 500}, "train.warmup is 500: it must be below run.steps, 500"),
        ({"lr_schedule": "cosine", "min_lr": 0.5}, "train.min_lr is 0.5: it must not exceed optimizer.lr, 0.1"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(settings: dict[str, object], part: str) -> None:
    with pytest.raises(ValidationError, match=part.replace(".", r"\.")):
        Config(train=settings)
