"""Gradients that are finite, and steps along them that are not. argv: OPTIMIZER STEP_AT.

`sgd`: at STEP_AT a gradient of 3e38 at a rate of 1,000. `adam`: eps 0 and a gradient of zeros, which is 0 / 0.
"""

from __future__ import annotations

import sys

import torch

import paramserver


def main() -> None:
    name, step_at = sys.argv[1], int(sys.argv[2])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, bias=False))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    if name == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0)
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, optimizer)
        while not session.is_done:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-5)
            if session.step == step_at:
                model[1].weight.grad.fill_(3e38 if name == "sgd" else 0.0)
            session.record(num_samples=1, loss=float("nan") if session.step == step_at else 1.0)
            optimizer.step()
        session.finish()


if __name__ == "__main__":
    main()
