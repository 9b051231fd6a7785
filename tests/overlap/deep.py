"""A task whose computing is real: nine layers of 340, 4.2 MB; a step on 2,000 samples takes about 0.1 s on one core."""

from __future__ import annotations

import torch
from torch import nn

_WIDTH = 340


class Deep:
    """Random data; the loss is the mean square of what comes out."""

    def __init__(self, samples: int = 2000, backwards: bool = False) -> None:
        """`backwards`: layers are registered in the opposite order of their use."""
        self._samples, self._backwards = samples, backwards

    def model(self) -> nn.Module:
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(9)]
        return _Chain(layers[::-1] if self._backwards else layers, self._backwards)

    def train_data(self) -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
        samples = torch.randn(4 * self._samples, _WIDTH, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(samples)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


class _Chain(nn.Module):
    def __init__(self, layers: list[nn.Linear], backwards: bool) -> None:
        super().__init__()
        self.layers, self._backwards = nn.ModuleList(layers), backwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self._backwards else self.layers:
            x = torch.tanh(layer(x))
        return x
