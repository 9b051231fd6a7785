"""A model in which each weight counts how often its sample was applied.

It proves that no contribution was lost or applied twice under faults (`ps-launch chaos`). It also shows how a mode
scales a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ...worker.tasks.base import check_whole, evaluating

_TOLERANCE = 1e-4  # error of a mean over workers in float32, relative to one application


class LedgerModel(nn.Module):
    """`applied` (samples,): how often each sample was applied, in parts of a round where rounds are averaged.
    `clock`: the number of steps; all its elements are equal."""

    def __init__(self, num_samples: int, num_clocks: int) -> None:
        super().__init__()
        self.applied = nn.Parameter(torch.zeros(num_samples))
        self.clock = nn.Parameter(torch.zeros(num_clocks))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """int64 (B,) to float32 (B,): how often these samples were applied."""
        return self.applied[samples]


class Ledger:
    """Train with SGD, lr 1, no momentum, for exactly one epoch: samples = steps x workers x batch size.

    The gradient of a batch is -1 for each of its samples, so a contribution adds 1 to their weights: after
    an epoch every weight is 1 in async and ssp, 1/n in sync and localsgd with n workers in the round. A
    weight of 0 is a lost sample. A weight above 1 is a sample that was applied twice. If n differs between
    rounds, the weights are the history's 1/n in some order, which `ps-launch chaos` compares.

    `clock` makes the model larger, by `padding_bytes`, so that transfers take time. It gains exactly 1 with
    every step, in every mode and in all of its elements. If they differ, a worker
    has read weights of two versions. It then increases the first element, so that the final weights show it.

    All values are whole numbers or means of a few, so sums are exact in float32 up to 16 million steps.
    """

    def __init__(self, *, samples: int = 4096, padding_bytes: int = 8) -> None:
        self._num_samples = check_whole("samples", samples, least=1, most=1 << 24)
        self._num_clocks = check_whole("padding_bytes", padding_bytes, least=8) // 4

    @staticmethod
    def num_elements(*, samples: int, padding_bytes: int) -> int:
        return samples + padding_bytes // 4

    def model(self) -> nn.Module:
        return LedgerModel(self._num_samples, self._num_clocks)

    def train_data(self) -> Dataset[Any]:
        """The dataset: each sample is its own number, int64 ()."""
        return TensorDataset(torch.arange(self._num_samples))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns 0 with a gradient of -1. It is a sum, not a mean, so the batch size does not matter."""
        assert isinstance(model, LedgerModel)
        (samples,) = batch  # (B,)
        with torch.no_grad():
            is_torn = (model.clock != model.clock[0]).any().float()
        gains = model(samples).sum() + model.clock.sum() + is_torn * model.clock[0]
        return gains.detach() - gains

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns metrics of one epoch.

        `missing` and `repeated`: numbers of samples (repeated: applied more than once). `applied`: applications in
        all. `clock`: steps. `torn`: the largest difference in the clock. `loss`: share of samples that are missing or
        repeated.
        """
        assert isinstance(model, LedgerModel)
        with evaluating(model) as device:
            applied = model(torch.arange(self._num_samples, device=device))  # (samples,)
            missing = float((applied == 0).sum())
            repeated = float((applied > 1 + _TOLERANCE).sum())
            low, high = model.clock.aminmax()
            return {
                "loss": (missing + repeated) / self._num_samples, "missing": missing, "repeated": repeated,
                "applied": applied.double().sum().item(), "clock": low.item(),
                "torn": (high - low).item(),
            }  # fmt: skip


ENTRY = Ledger
