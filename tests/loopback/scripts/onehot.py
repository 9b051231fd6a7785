"""Worker w's contribution at step k is the unit vector w * STEPS + k: the weights say what was applied, how often.

Run with SGD at lr 1 the weights end at minus the number of times each contribution was applied.
argv: STEPS [WAIT_FILE STEP]: at local step STEP wait until WAIT_FILE exists.
With PADDING there is a second parameter of so many elements, which count the steps applied.
"""

import os
import sys

import torch

import paramserver
from paramserver.tests.gates import Gate

MAX_WORKERS = 8


def main() -> None:
    steps, gate = int(sys.argv[1]), Gate(*sys.argv[2:])
    model = torch.nn.Module()
    model.seen = torch.nn.Parameter(torch.zeros(MAX_WORKERS * steps))
    if padding := int(os.environ.get("PADDING", "0")):
        model.padding = torch.nn.Parameter(torch.zeros(padding))
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
        while not session.is_done:
            step = optimizer.progress.row.seq
            gate.wait(step)
            model.seen.grad = torch.zeros_like(model.seen)
            model.seen.grad[session.rank * steps + step] = 1.0
            if padding:
                model.padding.grad = torch.ones_like(model.padding)
            session.record(num_samples=1, loss=float(step))
            optimizer.step()
        session.finish()


main()
