"""A frozen backbone with BatchNorm in eval, a new head, Adam; the model compiled."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, BATCH = 15, int(os.environ["BATCH"])
torch.manual_seed(0)
x = torch.randn(320, 8, dtype=torch.float64)
y = (x[:, 0] * x[:, 1] > 0).long()

backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).double()
head = nn.Linear(16, 2).double()
model = nn.Sequential(backbone, head)
backbone.requires_grad_(False)
backbone.eval()
compiled = torch.compile(model, backend="eager")

with paramserver.connect() as session:
    wanted = (p for p in model.parameters() if p.requires_grad)
    optimizer = session.optimizer(compiled, torch.optim.Adam(wanted, lr=1e-2))
    batches = iter(session.shard(TensorDataset(x, y), batch_size=BATCH, epochs=100))
    for _ in range(STEPS):
        inputs, labels = next(batches)
        loss = F.cross_entropy(compiled(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        session.record(loss=loss.item())
        optimizer.step()
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
