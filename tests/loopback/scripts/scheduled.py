"""A unit gradient under StepLR: the weight ends at minus the sum of the learning rates."""

import torch
from torch.utils.data import TensorDataset

import paramserver

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for _ in session.shard(TensorDataset(torch.zeros(64, 1)), batch_size=8):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        scheduler.step()
    session.finish()
print("weight", model.weight.item())
