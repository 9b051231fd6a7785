"""A task for runs on a GPU. It fails on another device, and in another precision, than the test asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

NUM_CLASSES, WIDTH, NUM_SAMPLES = 4, 64, 2048


class Checked:
    """Four classes of points around four centres, which a small network tells apart after some twenty steps.

    `devices`: the types of device that may compute, such as `cuda` or `cpu,cuda`. `precision`: of the network's
    output, as torch names it.
    """

    def __init__(self, *, devices: str = "cuda", precision: str = "float32", seed: int = 0) -> None:
        self._devices, self._precision = devices.split(","), getattr(torch, precision)
        generator = torch.Generator().manual_seed(seed)  # the CPU's: the same samples on every device
        centres = 2 * torch.randn(NUM_CLASSES, WIDTH, generator=generator)
        labels = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
        points = centres[labels] + torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self._data = TensorDataset(points, labels)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, NUM_CLASSES))

    def train_data(self) -> Dataset[Any]:
        return self._data

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        points, labels = batch
        output = model(points)
        found = {parameter.device.type for parameter in (points, labels, output, *model.parameters())}
        assert found <= set(self._devices) and len(found) == 1, f"computed on {found}, not on {self._devices}"
        assert output.dtype == self._precision, f"computed in {output.dtype}, not in {self._precision}"
        return F.cross_entropy(output.float(), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        points, labels = (tensor.to(device) for tensor in self._data.tensors)
        with torch.no_grad():
            return {"loss": F.cross_entropy(model(points).float(), labels).item()}
