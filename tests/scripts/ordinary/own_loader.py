"""A loader of one's own, seeded as usual: alike in every process. Or the session's, of data that is not the same."""

import os

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paramserver

torch.manual_seed(42)
x = torch.randn(64 + int(os.environ.get("MORE", "0")), 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(42)
model = torch.nn.Linear(4, 1)

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, wanted in session.shard(data, 8) if "MORE" in os.environ else DataLoader(data, 8, shuffle=True):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        if session.is_done:
            break
    session.finish()
