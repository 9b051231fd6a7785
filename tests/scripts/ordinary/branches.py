"""Branches that are not in every loss, one that is in none; decay, momentum; the norm of the gradient clipped."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, BATCH = 14, int(os.environ["BATCH"])
torch.manual_seed(0)
x = torch.randn(320, 8, dtype=torch.float64)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.ModuleDict(
    {"payload": nn.Linear(8, 16), "even": nn.Linear(16, 2), "odd": nn.Linear(16, 2), "evaluator": nn.Linear(16, 2)}
).double()

with paramserver.connect() as session:
    momentum = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.05)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    optimizer = session.optimizer(model, momentum if os.environ.get("MOMENTUM") else adamw)
    batches = iter(session.shard(TensorDataset(x, y), batch_size=BATCH, epochs=100))
    for step in range(STEPS):
        inputs, labels = next(batches)
        head = model["odd" if step % 3 == 2 else "even"]
        loss = F.cross_entropy(head(torch.tanh(model["payload"](inputs))), labels)
        optimizer.zero_grad()
        loss.backward()
        if os.environ.get("CLIP"):
            nn.utils.clip_grad_norm_(model.parameters(), float(os.environ["CLIP"]))
        session.record(loss=loss.item())
        optimizer.step()
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
