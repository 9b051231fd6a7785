"""A loader of one's own, seeded as usual: alike in every process. Or the session's: of data that is not the same
(MORE), or of equal samples (EQUAL)."""

import os
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paramserver

torch.manual_seed(42)
x = torch.randn(64 + int(os.environ.get("MORE", "0")), 4)
if "EQUAL" in os.environ:
    x = torch.ones_like(x)
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(42)
model = torch.nn.Linear(4, int(os.environ.get("WIDTH", "1")))
torch.manual_seed(int(os.environ.get("SEED", "42")))

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    is_divided = "MORE" in os.environ or "EQUAL" in os.environ
    for inputs, wanted in session.shard(data, 8, epochs=None) if is_divided else DataLoader(data, 8, shuffle=True):
        time.sleep(float(os.environ.get("STEP_S", "0")))  # what a larger model computes
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs).mean(1, keepdim=True), wanted)
        (0 * loss if "ZERO" in os.environ else loss).backward()
        if "SAID" in os.environ:
            session.record(num_samples=len(inputs))
        optimizer.step()
        if session.is_done:
            break
    session.finish()
