"""The interface of a task: four methods. Any object with them is a task; nothing needs to be inherited.

The constructor gets `task.args` of the configuration. Parameters named `seed` (int) and `device` (torch.device) get the
run's seed and the worker's device unless `task.args` sets them.

A built-in task has a static method `num_elements`, too. It returns the numbers that the data, the model and the
activations of one sample take for these arguments. A worker limits them if the arguments come from a server.

If a task's model has running statistics in layers of its own, an attribute `averaged_buffers` names them, as in
`session.optimizer()`.

The rest of this file has helpers of the built-in tasks: argument checks and evaluations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset

from ...common.errors import UsageError


class Task(Protocol):
    """A model, its data, its loss and its evaluation."""

    def model(self) -> nn.Module:
        """Return a new model. torch is seeded before the call, so equal seeds give equal weights."""

    def train_data(self) -> Dataset[Any]:
        """Return the training data, which is divided by rank.

        A TensorDataset is indexed one batch at a time. Every rank reads all of an IterableDataset and keeps its part.
        An optional method `sampler(dataset)` returns the order of the samples of all ranks (torch's Sampler).
        """

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the scalar mean loss of `batch`. A DataLoader made the batch; it is on the model's device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return held-out metrics by name, including `loss`."""


def check_whole(key: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return `value`, a whole number in [least, most]. Raises UsageError about `task.args.<key>` for other values."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"task.args.{key} is {value!r}, not a whole number", fix=f"e.g. {key}: {least}")
    return int(check_number(key, value, least=least, most=most))


def check_number(key: str, value: object, *, least: float, most: float | None = None) -> float:
    """Return `value`, a finite number in [least, most]. Raises UsageError about `task.args.<key>` for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        # YAML reads 1e-3 as text because it has no dot, which explains the hint.
        raise UsageError(f"task.args.{key} is {value!r}, not a number", fix=f"e.g. {key}: 0.001, or 1.0e-3")
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"task.args.{key} is {value}: it must be {limit}", fix=f"set {key} {limit}")
    return value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Disable gradients and set evaluation mode inside; restore the mode afterwards. Yields the parameters' device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def held_out_means(
    model: nn.Module,
    samples: tuple[torch.Tensor, ...],
    measure: Callable[..., dict[str, torch.Tensor]],
    batch_size: int = 1024,
) -> dict[str, float]:
    """Return mean metrics by name over `samples`, tensors of shape (N, ...).

    `measure` returns sums over a batch on the model's device. `batch_size` limits the memory of an evaluation.
    """
    sums: dict[str, float] = defaultdict(float)
    with evaluating(model) as device:
        for batch in zip(*(tensor.split(batch_size) for tensor in samples), strict=True):
            for name, value in measure(*(tensor.to(device) for tensor in batch)).items():
                sums[name] += value.item()
    return {name: value / len(samples[0]) for name, value in sums.items()}
