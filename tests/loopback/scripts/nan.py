"""Every contribution is NaN."""

import sys
import time
from pathlib import Path

import torch

import paramserver

model = torch.nn.Module()
model.seen = torch.nn.Parameter(torch.zeros(8 * int(sys.argv[1])))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while len(sys.argv) > 2 and not Path(sys.argv[2]).exists():
        time.sleep(0.005)
    while not session.is_done:
        model.seen.grad = torch.full_like(model.seen, float("nan"))
        optimizer.step()
