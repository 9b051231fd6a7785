"""Forks children in the middle of training: one leaves in every way that Python code leaves, one uses the session."""

import os
import sys

import torch

import paramserver

HOW = sys.argv[1]
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)


def leave() -> None:
    if HOW == "fail":
        raise RuntimeError("of the child")
    {
        "exit": lambda: sys.exit(0),
        "close": lambda: session.close(),
        "finish": lambda: session.finish(),
        "step": lambda: optimizer.step(),
        "record": lambda: session.record(loss=1.0),
        "shard": lambda: next(iter(session.shard(torch.zeros(8, 4), batch_size=2))),
    }[HOW]()


with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum(1).mean().backward()
        session.record(num_samples=2)
        optimizer.step()
        if step == 3:
            pid = os.fork()
            if not pid:
                leave()
                sys.exit(0)
            print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    session.finish()
print("weights", model.weight.tolist(), flush=True)
