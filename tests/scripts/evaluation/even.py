"""A task in which each contribution moves every weight by the same: those of one version are all equal."""

import torch
from torch.utils.data import TensorDataset


class Even:
    def model(self):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(300, 300))
        return model

    def train_data(self):
        return TensorDataset(torch.ones(400, 1))

    def loss(self, model, batch):
        return model.weight.sum() * batch[0].mean()

    def evaluate(self, model):
        spread = (model.weight.max() - model.weight.min()).item()
        return {"loss": model.weight.mean().item(), "spread": spread}
