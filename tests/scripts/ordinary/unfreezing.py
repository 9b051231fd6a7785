"""A backbone that is frozen for half of the steps and in the optimizer from the beginning; gradients that are zeroed
once only; two backward passes to a step."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, BATCH = 12, int(os.environ["BATCH"])
torch.manual_seed(0)
x = torch.randn(240, 8, dtype=torch.float64)
y = (x[:, 0] > x[:, 1]).long()
model = nn.ModuleDict({"backbone": nn.Linear(8, 16), "head": nn.Linear(16, 2)}).double()
model["backbone"].requires_grad_(False)

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    batches = iter(session.shard(TensorDataset(x, y), batch_size=BATCH, epochs=100))
    for step in range(STEPS):
        inputs, labels = next(batches)
        if step == STEPS // 2:
            model["backbone"].requires_grad_(True)
            optimizer.zero_grad()
        features = torch.tanh(model["backbone"](inputs))
        F.cross_entropy(model["head"](features), labels).backward(retain_graph=True)
        (0.1 * features.square().mean() + 0.1 * model["head"].weight.square().sum()).backward()
        optimizer.step()
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
