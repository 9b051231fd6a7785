"""Epochs over a loader of NUM samples, as one writes them. argv: EPOCHS of the script's own; 0: one loop until the run
ends."""

import os
import sys

import torch
from torch.utils.data import TensorDataset

import paramserver

EPOCHS, NUM = int(sys.argv[1]), int(os.environ.get("NUM", "40"))

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
session = paramserver.connect()
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
samples = TensorDataset(torch.randn(NUM, 4, generator=torch.Generator().manual_seed(1)), torch.ones(NUM, 1))
num_steps = 0
for epoch in range(EPOCHS or 1):
    for x, y in session.shard(samples, batch_size=4, epochs=1 if EPOCHS else None):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_steps += 1
    print(f"rank {session.rank} epoch {epoch} steps {num_steps}", flush=True)
session.finish()
print(f"rank {session.rank} has {model.weight.sum().item():.9f}", flush=True)
