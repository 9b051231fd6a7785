"""Rank 1 fails once. Rank 0 trains on when it is started again, and it asks for the server when that has ended."""

import os
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paramserver

AGAIN, END = Path("again"), Path("w.safetensors")
IS_SECOND, FAILED = os.environ["PS_WORKER__RANK"] == "1", Path("failed")


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


if IS_SECOND and FAILED.exists():
    AGAIN.touch()
    until(END)
session = paramserver.connect()
model = torch.nn.Linear(4, 1)
optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
for number, (x, y) in enumerate(session.shard(data, batch_size=4, epochs=None)):
    if number == 5:
        if IS_SECOND:
            FAILED.touch()
            raise ValueError("in the middle")
        until(AGAIN)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
session.finish()
