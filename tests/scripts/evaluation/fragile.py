"""A small task whose evaluation gives the sum of the weights, and fails where FAIL is in the environment."""

import os

import torch
from torch.utils.data import TensorDataset


class Fragile:
    def __init__(self):
        self.steps, self.done = open("steps.txt", "a"), 0  # noqa: SIM115 (left open, as people do)

    def model(self):
        return torch.nn.Linear(4, 1)

    def train_data(self):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        print(self.done, file=self.steps)
        self.done += 1
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model):
        if "FAIL" in os.environ:
            raise ValueError("no such metric")
        total = sum(parameter.double().sum().item() for parameter in model.parameters())
        return {"loss": abs(5 - total), "total": total}
