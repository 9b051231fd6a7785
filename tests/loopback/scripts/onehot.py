"""Worker w's contribution at step k is the unit vector w * STEPS + k: the weights say what was applied, how often.

Run with SGD at lr 1 the weights end at minus the number of times each contribution was applied.
argv: STEPS [WAIT_FILE STEP]: at local step STEP wait until WAIT_FILE exists.
With CUT_EVERY=N the direct connection breaks at every N-th step, and the stream does not.
With PADDING there is a second parameter of so many elements, which count the steps applied.
"""

import os
import sys
import time
from pathlib import Path

import torch

import paramserver

MAX_WORKERS = 8


def main() -> None:
    steps = int(sys.argv[1])
    gate, gate_step = (Path(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else (None, -1)
    model = torch.nn.Module()
    model.seen = torch.nn.Parameter(torch.zeros(MAX_WORKERS * steps))
    if padding := int(os.environ.get("PADDING", "0")):
        model.padding = torch.nn.Parameter(torch.zeros(padding))
    cut_every, cut_at = int(os.environ.get("CUT_EVERY", "0")), 0
    with paramserver.connect() as session:
        optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
        while not session.is_done:
            step = optimizer.progress.row.seq
            if gate is not None and step == gate_step:
                print("at the gate", flush=True)
                while not gate.exists():
                    time.sleep(0.005)
            model.seen.grad = torch.zeros_like(model.seen)
            model.seen.grad[session.rank * steps + step] = 1.0
            if padding:
                model.padding.grad = torch.ones_like(model.padding)
            if step and cut_every and step % cut_every == 0 and step != cut_at:
                cut_at = step
                session._exchange.shards.first.stream.direct.hang_up()
            session.record(num_samples=1, loss=float(step))
            optimizer.step()
        session.finish()


main()
