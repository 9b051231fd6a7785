"""A small task in double precision, whose data do not divide evenly."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

NUM_SAMPLES = 50


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].sin().sum(1, keepdim=True))


class OneByOne(Dataset):
    def __init__(self) -> None:
        self.inner = data()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Double:
    def __init__(self, one_by_one: bool = False) -> None:
        self.train = OneByOne() if one_by_one else data()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def train_data(self) -> Dataset:
        return self.train

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, data().tensors))}


class Lines(IterableDataset):
    """As a file of lines: one after another, each epoch in another order."""

    def __iter__(self) -> Any:
        inner = data()
        return (inner[index] for index in torch.randperm(len(inner)).tolist())


class Streamed(Double):
    def train_data(self) -> Dataset:
        return Lines()


class Weighted(Double):
    def sampler(self, dataset: Dataset) -> Sampler:
        return WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1), NUM_SAMPLES)
