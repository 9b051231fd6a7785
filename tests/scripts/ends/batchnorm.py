"""BatchNorm's statistics are computed again `before` or `after` finish(), or `never` (argv[1])."""

import sys

import torch
from torch.optim.swa_utils import update_bn

import paramserver

torch.manual_seed(0)
samples = torch.randn(24, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
session = paramserver.connect()
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
for (batch,) in session.shard(torch.utils.data.TensorDataset(samples), batch_size=8, epochs=2):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
model.eval()
model(samples)
if sys.argv[1] == "before":
    update_bn([samples], model)
session.finish()
if sys.argv[1] == "after":
    update_bn([samples], model)
session.close()
