"""Linear regression on synthetic data. The solution w* is known, so a run can be checked against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ...common.errors import UsageError
from .base import check_number, check_whole, evaluating

_NUM_HELD_OUT = 2_000


class Linear:
    """Y = X w* + noise, with standard normal X and w*. `noise` is the standard deviation of the noise.

    SGD with lr 0.05 and batches of 32 brings the weight error below 0.01 within 100 steps per worker, in sync and with
    four asynchronous workers. The data are on `device`, so a worker with a GPU trains without copies from the host.
    """

    def __init__(
        self,
        *,
        num_features: int = 100,
        num_outputs: int = 1,
        num_samples: int = 20_000,
        noise: float = 0.1,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check_whole("num_features", num_features, least=1)
        check_whole("num_outputs", num_outputs, least=1)
        check_whole("num_samples", num_samples, least=1)
        check_number("noise", noise, least=0)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise UsageError(f"task.args.device is {device!r}, which torch does not know", fix="e.g. cuda:0") from None
        # The CPU's generator draws the data, because torch's generators differ between devices. Workers on a CPU and on
        # a GPU must see the same samples, or their shards overlap.
        generator = torch.Generator().manual_seed(check_whole("seed", seed, least=0))
        w_star = torch.randn(num_features, num_outputs, generator=generator, device="cpu")  # (F, O)

        def draw(num: int) -> tuple[torch.Tensor, torch.Tensor]:  # (num, F), (num, O)
            x = torch.randn(num, num_features, generator=generator, device="cpu")
            y = x @ w_star + noise * torch.randn(num, num_outputs, generator=generator, device="cpu")
            return x.to(device), y.to(device)

        self.w_star = w_star.to(device)
        self._held_out = draw(_NUM_HELD_OUT)
        self._train = TensorDataset(*draw(num_samples))

    @staticmethod
    def num_elements(*, num_features: int, num_outputs: int, num_samples: int, **_: Any) -> int:
        return (num_samples + _NUM_HELD_OUT) * (num_features + num_outputs) + num_features * num_outputs

    def model(self) -> nn.Module:
        num_features, num_outputs = self.w_star.shape
        return nn.Linear(num_features, num_outputs, bias=False)

    def train_data(self) -> Dataset[Any]:
        """Samples are x (F,) and y (O,), float32."""
        return self._train

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch  # (B, F), (B, O)
        return F.mse_loss(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return held-out `loss` (mean squared error; at best noise^2) and `weight_error`, |w - w*| / |w*|."""
        x, y = self._held_out
        with evaluating(model) as device:
            w = next(model.parameters()).T  # (F, O)
            return {
                "loss": F.mse_loss(model(x.to(device)), y.to(device)).item(),
                "weight_error": (torch.linalg.norm(w - self.w_star.to(device)) / self.w_star.norm()).item(),
            }


ENTRY = Linear
