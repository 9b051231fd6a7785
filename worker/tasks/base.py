"""What a task is: four methods. Any object with them will do; nothing needs to be inherited.

    class MyTask:
        def __init__(self, hidden: int = 64) -> None: ...        # `task.args` of the configuration
        def model(self) -> nn.Module: ...
        def train_data(self) -> Dataset: ...
        def loss(self, model, batch) -> Tensor: ...              # scalar, mean over the batch
        def evaluate(self, model) -> dict[str, float]: ...       # {"loss": ..., "accuracy": ...}

A constructor that has parameters named `seed` (int) or `device` (torch.device) is given the
run's seed and the worker's device unless `task.args` sets them.

The rest of this file is what the built-in tasks share: checks of their arguments, and `evaluating`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import Dataset

from ...common.errors import UsageError


@runtime_checkable
class Task(Protocol):
    """A model, its data, its loss and its evaluation."""

    def model(self) -> nn.Module:
        """A new model. torch is seeded before the call, so equal seeds give equal weights."""

    def train_data(self) -> Dataset[Any]:
        """A map-style data set; it is sharded by rank. A TensorDataset is indexed a batch at a time."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Scalar mean loss of `batch`, which is what a DataLoader yields, on the model's device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out figures by name; always has `loss`."""


def check_whole(key: str, value: object, *, least: int, most: int | None = None) -> int:
    """`value` if it is a whole number in [least, most]; UsageError on `task.args.<key>` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"task.args.{key} is {value!r}, not a whole number", fix=f"e.g. {key}: {least}")
    return int(check_number(key, value, least=least, most=most))


def check_number(key: str, value: object, *, least: float, most: float | None = None) -> float:
    """`value` if it is a finite number in [least, most]; UsageError on `task.args.<key>` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        # YAML reads 1e-3 as text, for lack of a dot; hence the hint.
        raise UsageError(
            f"task.args.{key} is {value!r}, not a number",
            fix=f"write {key} as a plain number, e.g. 0.001 or 1.0e-3",
        )
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
