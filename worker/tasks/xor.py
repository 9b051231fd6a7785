"""Exclusive or of two signs among many distracting features, which a linear model learns from products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from .base import check_number, check_whole, held_out_means

_NUM_PRODUCTS = 3  # x0^2, x1^2, x0*x1
# The factor shortens the way of the one weight that matters to a tenth, while Adam moves all 203 weights by about lr
# per step. After 1,200 steps (Adam, lr 0.05, batch 32) the held-out loss is 0.10 with it and 0.21 without. A factor of
# 40 depends too much on the first weights.
_PRODUCT_SCALE = 10.0
_NUM_HELD_OUT = 10_000


class Xor:
    """Label (x0 > 0) xor (x1 > 0) on `d` standard-normal features plus x0^2, x1^2 and x0*x1, scaled.

    The label is the sign of -x0*x1, so logistic regression needs only the last weight. With d = 200 the model has 203
    weights and a bias, so a run measures the exchange rather than arithmetic. 1,200 updates of Adam with lr 0.05 and
    batches of 32 reach a loss of 0.10 to 0.13, and 0.11 to 0.15 with four asynchronous workers (batches of 64: 0.09 to
    0.11). `label_noise` is the fraction of flipped training labels; held-out labels are never flipped. Samples depend
    only on `seed`, so every worker makes the same data set.
    """

    def __init__(self, *, d: int = 200, num_samples: int = 200_000, label_noise: float = 0.0, seed: int = 0) -> None:
        self._d = check_whole("d", d, least=2)
        self._num_samples = check_whole("num_samples", num_samples, least=1)
        self._label_noise = check_number("label_noise", label_noise, least=0, most=0.5)
        self._seed = check_whole("seed", seed, least=0)

    @staticmethod
    def num_elements(*, d: int, num_samples: int, **_: Any) -> int:
        return (num_samples + _NUM_HELD_OUT) * (d + _NUM_PRODUCTS)

    def model(self) -> nn.Module:
        return nn.Linear(self._d + _NUM_PRODUCTS, 1)

    def train_data(self) -> Dataset[Any]:
        """Samples are features (d + 3,) float32 and a label () float32, 0 or 1. The default is 163 MB, made in 1 s."""
        generator = torch.Generator().manual_seed(2 * self._seed)
        features, labels = self._samples(self._num_samples, generator)
        flipped = torch.rand(self._num_samples, generator=generator, device="cpu") < self._label_noise
        return TensorDataset(features, torch.where(flipped, 1 - labels, labels))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        features, labels = batch  # (B, d + 3), (B,)
        return F.binary_cross_entropy_with_logits(model(features).squeeze(1), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return `loss` (nats per sample) and `accuracy` (0..1) on fresh samples, which are the same in every call."""

        def measure(features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = model(features).squeeze(1)  # (B,)
            loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            return {"loss": loss, "accuracy": ((logits > 0) == (labels > 0)).sum()}

        # The training data have an even seed, so an odd seed gives other samples.
        held_out = self._samples(_NUM_HELD_OUT, torch.Generator().manual_seed(2 * self._seed + 1))
        return held_out_means(model, held_out, measure)

    def _samples(self, num_samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (num_samples, d + 3) and labels (num_samples,), both float32."""
        features = torch.empty(num_samples, self._d + _NUM_PRODUCTS, device="cpu")  # filled in place: no second copy
        features[:, : self._d].normal_(generator=generator)
        x0, x1 = features[:, 0], features[:, 1]
        features[:, self._d :] = _PRODUCT_SCALE * torch.stack([x0 * x0, x1 * x1, x0 * x1], dim=1)
        return features, ((x0 > 0) ^ (x1 > 0)).float()


ENTRY = Xor
