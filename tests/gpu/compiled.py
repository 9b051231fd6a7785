"""A user's script whose model is compiled: DEVICE BACKEND. It prints the first loss and the last."""

import sys

import torch
from torch.nn import functional as F

import paramserver

device, backend = sys.argv[1:]
torch.manual_seed(0)
inputs = torch.randn(1024, 32)
data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(32, 1))
plain = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
model = torch.compile(plain, backend=backend)
with paramserver.connect() as session:
    optimizer = session.optimizer(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    losses = []
    for x, y in session.shard(data, batch_size=32, epochs=None):
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        assert {parameter.grad.device.type for parameter in plain.parameters()} == {device}
        optimizer.step()
        losses.append(loss.item())
print(f"LOSSES {losses[0]} {losses[-1]} {session.rank}")
