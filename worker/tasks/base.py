"""What a task is: four methods. Any object with them will do; nothing needs to be inherited.

    class MyTask:
        def __init__(self, hidden: int = 64) -> None: ...        # `task.args` of the configuration
        def model(self) -> nn.Module: ...
        def train_data(self) -> Dataset: ...
        def loss(self, model, batch) -> Tensor: ...              # scalar, mean over the batch
        def evaluate(self, model) -> dict[str, float]: ...       # {"loss": ..., "accuracy": ...}

A constructor that has parameters named `seed` (int) or `device` (torch.device) is given the
run's seed and the worker's device unless `task.args` sets them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import Dataset


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
