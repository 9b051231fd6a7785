"""Tasks that ps-serve loads as files: a text model without a cache, and the synthetic model of a given size."""

from __future__ import annotations

from typing import Any

from torch import nn

from paramserver.benchmarks.rig.model import synthetic_model
from paramserver.worker.tasks.gpt import Gpt


class WithoutCache:
    """The task gpt without `cache_shape`: ps-serve computes the whole text again for each token."""

    def __init__(self, **sizes: Any) -> None:
        task = Gpt(**sizes)
        self.model, self.encode, self.decode, self.context = task.model, task.encode, task.decode, task.context
        self.train_data, self.loss, self.evaluate = task.train_data, task.loss, task.evaluate


class Synthetic:
    """A model that is only fetched."""

    def __init__(self, num_floats: int) -> None:
        self._num_floats = num_floats

    def model(self) -> nn.Module:
        return synthetic_model(self._num_floats)

    def train_data(self) -> Any:
        return []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        raise NotImplementedError
