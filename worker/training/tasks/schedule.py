"""The learning rate of a task at each training step.

It depends only on the step, so nothing needs to be saved, and a resumed worker gets the right rate.
"""

from __future__ import annotations

import math

from ....common.config.schema import TrainConfig


def rate_at(step: int, num_steps: int, lr: float, train: TrainConfig) -> float:
    """The learning rate of training step `step` (from 0) of `num_steps`.

    It equals torch's SequentialLR of LinearLR(start_factor=1 / (warmup + 1), total_iters=warmup) and then
    CosineAnnealingLR, LinearLR or StepLR over the remaining steps.
    """
    if step < train.warmup:
        return lr * (step + 1) / (train.warmup + 1)
    step, num_steps = step - train.warmup, max(1, num_steps - train.warmup)
    part = min(1.0, step / num_steps)
    match train.lr_schedule:
        case "cosine":
            return train.min_lr + (lr - train.min_lr) * (1 + math.cos(math.pi * part)) / 2
        case "linear":
            return lr + (train.min_lr - lr) * part
        case "step":
            assert train.lr_step_size is not None
            return lr * float(train.lr_gamma ** (step // train.lr_step_size))
    return lr
