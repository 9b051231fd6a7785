"""Adam with two groups and a branch without a gradient; saves its optimizer's state in the middle, as people do."""

import os

import torch
from torch.nn import functional as F

import paramserver


def make():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(3, 5), "evaluator": torch.nn.Linear(3, 1), "b": torch.nn.Linear(5, 1)}
    )
    model.double()
    groups = [
        {"params": model["b"].parameters()},
        {"params": [*model["a"].parameters(), *model["evaluator"].parameters()]},
    ]
    return model, torch.optim.AdamW([{**groups[0], "lr": 0.01}, groups[1]], lr=0.02)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 3, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model["b"](torch.tanh(model["a"](x))), x.sum(1, keepdim=True)).backward()
        optimizer.step()


if __name__ == "__main__":
    with paramserver.connect() as session:
        model, optimizer = make()
        optimizer = session.optimizer(model, optimizer)
        assert not optimizer.state_dict()["state"]
        train(model, optimizer, 4)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)  # as it is: nothing is lost, and nothing is said
        torch.save(state, os.environ["OUT"])
