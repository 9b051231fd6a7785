"""A loader of one's own, seeded as usual: alike in every process."""

import os
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paramserver

torch.manual_seed(42)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(42)
model = torch.nn.Linear(4, int(os.environ.get("WIDTH", "1")))
torch.manual_seed(int(os.environ.get("SEED", "42")))

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, wanted in DataLoader(data, 8, shuffle=True):
        time.sleep(float(os.environ.get("STEP_S", "0")))  # what a larger model computes
        optimizer.zero_grad()
        F.mse_loss(model(inputs).mean(1, keepdim=True), wanted).backward()
        if "SAID" in os.environ:
            session.record(num_samples=len(inputs))
        optimizer.step()
        if session.is_done:
            break
    session.finish()
