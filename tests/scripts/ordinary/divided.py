"""A regression with dropout where asked for, gradients accumulated over ACCUMULATE batches, in loops of any shape."""

import os
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver

NUM, ACCUMULATE = int(os.environ["NUM"]), int(os.environ.get("ACCUMULATE", "1"))
GATE, GATE_AT = os.environ.get("GATE"), int(os.environ.get("GATE_AT", "-1"))  # batches before it waits for a file


def ahead(batches):
    """Fetches a batch before the one at hand is used, as trainers do."""
    batches = iter(batches)
    fetched = next(batches)
    for batch in batches:
        yield fetched
        fetched = batch
    yield fetched


generator = torch.Generator().manual_seed(3)
x = torch.randn(NUM, 6, dtype=torch.float64, generator=generator)
y = x @ torch.randn(6, 1, dtype=torch.float64, generator=generator)
torch.manual_seed(0)
dropout = torch.nn.Dropout(float(os.environ.get("DROPOUT", "0")))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), dropout, torch.nn.Linear(8, 1)).double()

with paramserver.connect() as session:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = session.optimizer(model, inner)
    stated = {"accumulate": ACCUMULATE, "prefetch": int(bool(os.environ.get("AHEAD"))), "epochs": None}
    batches = session.shard(TensorDataset(x, y), 4, shuffle=os.environ.get("SHUFFLE") != "no", **stated)
    print(f"{len(batches)} batches", flush=True)
    for number, (inputs, wanted) in enumerate(ahead(batches) if os.environ.get("AHEAD") else batches):
        if number == GATE_AT:
            print("at the gate", flush=True)
            while not Path(GATE).exists():
                time.sleep(0.01)
        (F.mse_loss(model(inputs), wanted) / ACCUMULATE).backward()
        if (number + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    session.finish()
    torch.save(model.state_dict(), os.environ["OUT"])
