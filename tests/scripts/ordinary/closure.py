"""A GradScaler that does nothing on the CPU, a closure, and weight decay on a model in double precision."""

import os

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

STEPS, BATCH = 12, int(os.environ["BATCH"])
torch.manual_seed(0)
x = torch.randn(256, 6, dtype=torch.float64)
y = x @ torch.randn(6, 1, dtype=torch.float64)
model = torch.nn.Linear(6, 1).double()

with paramserver.connect() as session:
    inner = torch.optim.RMSprop(model.parameters(), lr=0.01, weight_decay=0.01, momentum=0.5)
    optimizer = session.optimizer(model, inner)
    batches = iter(session.shard(TensorDataset(x, y), batch_size=BATCH, epochs=100))
    for _ in range(STEPS):
        inputs, wanted = next(batches)

        def closure(inputs=inputs, wanted=wanted):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), wanted)
            loss.backward()
            return loss

        session.record(loss=float(optimizer.step(closure)))
    if session.finish():
        torch.save(model.state_dict(), os.environ["OUT"])
