"""Training steps of a task: accumulated batches, mixed precision and the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....common.config.schema import TASK_STEPS
from ....common.user_code import user_code
from ...tasks.base import Task
from ..batches import Batches
from ..data import to_device
from ..pipeline import Pipeline
from ..session import Session
from .schedule import rate_at

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# At a smaller scale, scaling no longer causes the infinities.
_LEAST_SCALE = 1.0


class Stepper:
    """Takes the training steps of one task, as `session.settings.train` configures them.

    The gradient of a step is that of the mean over all samples of its batches. A step whose gradient overflows in fp16
    is skipped: its batches count for nothing, and the loss scale becomes smaller.
    """

    def __init__(
        self, session: Session, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._session, self._task, self._model, self._optimizer = session, task, model, optimizer
        self._device = device
        self._train = session.settings.train
        self._lr = [group["lr"] for group in optimizer.param_groups]
        dtype = _DTYPES.get(self._train.precision)
        self._autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self._num_samples: list[int] = []  # of each batch of the current step

    def add(self, batches: Batches, batch: Any) -> float:
        """Add a batch, and take a step after the last batch of one. Returns the batch's mean loss."""
        self._num_samples.append(batches.num_samples)
        with user_code():
            # Weights the loss as if each batch were as large as the first; `_even_out` corrects unequal batches.
            share = self._num_samples[-1] / self._num_samples[0] / self._train.accumulate
            if len(self._num_samples) == 1:
                self._optimizer.zero_grad()
            with self._autocast:
                here = to_device(batch, self._device)
                if isinstance(self._model, Pipeline):  # with its backward pass
                    loss = self._model.step(here, share * self._scaler.get_scale())
                else:
                    loss = self._task.loss(self._model, here)
            if not isinstance(self._model, Pipeline):
                self._scaler.scale(loss if share == 1 else loss * share).backward()
        value = float(loss.detach())
        self._session.record(loss=value)
        if len(self._num_samples) == self._train.accumulate or not batches.remaining:
            factor = self._num_samples[0] * self._train.accumulate / sum(self._num_samples)
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            if factor != 1 and gradients:
                torch._foreach_mul_(gradients, factor)
            self._step()
            self._num_samples.clear()
        return value

    def _step(self) -> None:
        num_steps = self._session._progress.total_steps or TASK_STEPS
        for group, lr in zip(self._optimizer.param_groups, self._lr, strict=True):
            rate = rate_at(self._session.step, num_steps, lr, self._train)
            if rate != group["lr"]:
                group["lr"] = rate
        if not self._scaler.is_enabled():
            self._optimizer.step()
            return
        scale = self._scaler.get_scale()
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < scale and scale > _LEAST_SCALE:
            self._session.skip_step(self._optimizer)
        else:
            self._optimizer.step()
