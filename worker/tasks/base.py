"""What a task is: four methods. Any object with them will do; nothing needs to be inherited.

Its constructor is given `task.args` of the configuration. Parameters of it that are named `seed` (int) or `device`
(torch.device) get the run's seed and the worker's device unless `task.args` sets them.

A task whose model keeps running statistics in layers of its own names them in an attribute `averaged_buffers`, as
`session.optimizer()` takes it.

The rest of this file is what the built-in tasks share: checks of their arguments, and evaluations.
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
        """A new model. torch is seeded before the call, so equal seeds give equal weights."""

    def train_data(self) -> Dataset[Any]:
        """A data set; it is sharded by rank. A TensorDataset is indexed a batch at a time; of an IterableDataset every
        rank reads all, and keeps its part. A method `sampler(dataset)`, if there is one, gives the order of the samples
        of all ranks (torch's Sampler)."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Scalar mean loss of `batch`, which is what a DataLoader yields, on the model's device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out metrics by name; always has `loss`."""


def check_whole(key: str, value: object, *, least: int, most: int | None = None) -> int:
    """`value` if it is a whole number in [least, most]; UsageError on `task.args.<key>` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"task.args.{key} is {value!r}, not a whole number", fix=f"e.g. {key}: {least}")
    return int(check_number(key, value, least=least, most=most))


def check_number(key: str, value: object, *, least: float, most: float | None = None) -> float:
    """`value` if it is a finite number in [least, most]; UsageError on `task.args.<key>` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        # YAML reads 1e-3 as text, for lack of a dot; hence the hint.
        raise UsageError(f"task.args.{key} is {value!r}, not a number", fix=f"e.g. {key}: 0.001, or 1.0e-3")
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"task.args.{key} is {value}: it must be {limit}", fix=f"set {key} {limit}")
    return value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """No gradients and eval mode inside, the mode before afterwards. Yields the parameters' device."""
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
    """Metrics by name, per sample of `samples` (each tensor (N, ...)). `measure` gives their sums over a batch of
    `batch_size` at most, which bounds the memory of an evaluation, on the model's device."""
    sums: dict[str, float] = defaultdict(float)
    with evaluating(model) as device:
        for batch in zip(*(tensor.split(batch_size) for tensor in samples), strict=True):
            for name, value in measure(*(tensor.to(device) for tensor in batch)).items():
                sums[name] += value.item()
    return {name: value / len(samples[0]) for name, value in sums.items()}
