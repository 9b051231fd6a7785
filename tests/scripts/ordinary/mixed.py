"""bfloat16 by autocast, gradients accumulated over batches and clipped. Rounding to bfloat16 depends on what is summed,
so the plain process computes the two halves of its batch one after the other."""

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, ACCUMULATE, BATCH = 8, 3, int(os.environ["BATCH"])
HALVES = BATCH // 10
torch.manual_seed(0)
x = torch.randn(480, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))

with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches = iter(session.shard(TensorDataset(x, y), batch_size=BATCH, epochs=100, accumulate=ACCUMULATE))
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(ACCUMULATE):
            inputs, labels = next(batches)
            for part in range(HALVES):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(inputs[part::HALVES]), labels[part::HALVES])
                (loss / ACCUMULATE / HALVES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # of the mean where it matters: --clip-norm
        optimizer.step()
    if session.finish():
        torch.save({name: item.double() for name, item in model.state_dict().items()}, os.environ["OUT"])
