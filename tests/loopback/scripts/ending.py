"""One loop over 8 batches, whose samples the weights count. argv: a file that rank 1 waits for before its loop."""

import sys

import torch

import paramserver
from paramserver.tests.gates import Gate

model = torch.nn.Module()
model.seen = torch.nn.Parameter(torch.zeros(16))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batches = session.shard(torch.arange(16), batch_size=1)
    print(f"rank {session.rank} begins", flush=True)
    Gate(sys.argv[1], "1").wait(session.rank)
    for batch in batches:
        model.seen.grad = torch.zeros(16).index_fill_(0, batch, 1.0)
        optimizer.step()
    session.finish()
