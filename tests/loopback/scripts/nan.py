"""Every contribution is NaN."""

import sys

import paramserver
import torch

model = torch.nn.Module()
model.seen = torch.nn.Parameter(torch.zeros(8 * int(sys.argv[1])))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while not session.is_done:
        model.seen.grad = torch.full_like(model.seen, float("nan"))
        optimizer.step()
