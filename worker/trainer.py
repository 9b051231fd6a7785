"""The training loop for a task: accumulated batches, mixed precision and the learning rate.

It uses a session as a user's script does (`worker/api.py`), and knows no mode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..common.config.schema import TASK_STEPS
from ..common.errors import DivergedError, UsageError
from ..common.tensors.optimizers import build_optimizer, check_arguments
from ..common.user_code import user_code
from .api import Session
from .tasks.base import Task
from .training.batches import Batches
from .training.data import to_device
from .training.pipeline import Pipeline
from .training.tasks.init import load_weights
from .training.tasks.schedule import rate_at

_SAY_EVERY_S = 5.0
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# At a smaller scale, scaling no longer causes the infinities.
_LEAST_SCALE = 1.0


def train(
    session: Session,
    task: Task,
    batch_size: int,
    device: torch.device,
    say: Callable[..., object] | None = None,
    init: str | None = None,
    loader: dict[str, Any] | None = None,
) -> nn.Module:
    """Train `task` to the end of the run, and report its metrics if this worker evaluates.

    The run's settings name the optimizer. Returns the model. `say(event, **fields)` is called with the progress from
    time to time. `init`: a file with the run's initial weights. `loader`: options of the DataLoader.
    """
    settings = session.settings
    torch.manual_seed(settings.seed)
    is_read_by_stages = session.has_stages and init is not None
    with user_code():
        with torch.device("meta") if is_read_by_stages else nullcontext():
            model = task.model()
        data = task.train_data()
    if not is_read_by_stages:
        model = model.to(device)
        if init is not None:
            load_weights(model, init)

    def first(num: int) -> Any:
        """The first samples, as one of `num` microbatches."""
        with torch.random.fork_rng(devices=[]), user_code():
            return to_device(next(iter(DataLoader(data, batch_size=max(1, batch_size // num)))), device)

    model = session.divided(model, task.loss, first, init if is_read_by_stages else None)
    model.train()
    check_arguments(settings.optimizer, settings.optimizer_args or {})  # they may come from a server
    groups = [{"params": list(model.parameters())}]
    inner = build_optimizer(settings.optimizer, groups, settings.optimizer_args)
    optimizer = session.optimizer(model, inner, averaged_buffers=getattr(task, "averaged_buffers", ()))
    started = said_at = time.perf_counter()
    num_batches = 0
    if settings.steps is None and settings.epochs is None:
        session.length.default = TASK_STEPS
    if settings.eval_every is not None or settings.ends_by_metrics:
        session.evaluate(lambda model: _metrics(task, model))
        session.evaluation.is_final_too = False  # evaluated below, with more metrics
    if say is not None:
        length = {"epochs": settings.epochs} if settings.epochs else {"steps": settings.steps or TASK_STEPS}
        say("training", rank=session.rank, workers=session.num_workers, mode=settings.mode, **length)
    accumulate = settings.train.accumulate
    options = dict(loader or {})
    if callable(make := getattr(task, "sampler", None)):
        with user_code():
            options["sampler"] = make(data)
    batches = session.shard(data, batch_size, accumulate=accumulate, epochs=None, **options)
    stepper = Stepper(session, task, model, optimizer, device)
    for batch in _checked(batches):
        loss = stepper.add(batches, batch)
        num_batches += 1
        if say is not None and time.perf_counter() - said_at >= _SAY_EVERY_S:
            said_at = time.perf_counter()
            say("progress", rank=session.rank, batches=num_batches, loss=f"{loss:.4g}")
    wall_s = time.perf_counter() - started
    if say is not None:
        say("trained", rank=session.rank, batches=num_batches, seconds=round(wall_s, 1))
    if session.finish():
        metrics = _evaluate(session, task, model)
        tokens = getattr(task, "tokens_per_sample", None)
        if tokens and wall_s:
            metrics["tokens_per_s"] = round(num_batches * batch_size * session.num_workers * tokens / wall_s, 1)
        session.report(**metrics)
    return model


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
            group["lr"] = rate_at(self._session.step, num_steps, lr, self._train)
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


def _checked(batches: Any) -> Any:
    """Yield the batches. An exception in the user's data set becomes a UserCodeError."""
    loop, end = iter(batches), object()
    while True:
        with user_code():
            batch = next(loop, end)
        if batch is end:
            return
        yield batch


def _evaluate(session: Session, task: Task, model: nn.Module) -> dict[str, float]:
    """The task's metrics on the final weights, and `averaged_*` on their Polyak average if the run keeps one."""
    metrics = _metrics(task, model)
    if session.averaged(model):
        metrics.update({f"averaged_{name}": value for name, value in _metrics(task, model).items()})
    if math.isnan(metrics.get("loss", 0.0)):
        raise DivergedError("the final loss is NaN", fix="lower --lr")
    return metrics


def _metrics(task: Task, model: nn.Module) -> dict[str, float]:
    with user_code():
        return {name: float(value) for name, value in task.evaluate(model).items()}


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device; `auto` is CUDA if there is any. Raises UsageError for a device that does not exist.

    Of several CUDA devices on a host `auto` is that of the local rank. Workers share a device if there are more workers
    than devices. If an engine gives each process one device, the process sees only that device.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        if local_rank is not None and count > 1:
            return torch.device("cuda", local_rank % count)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not count or (device.index or 0) >= count):
        raise UsageError(f"--device {name}: this machine has {count} CUDA devices", fix="use --device auto or cpu")
    return device
