"""A loop with a length of its own, longer than the run's; told nothing, it goes by that."""

import torch

import paramserver

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
