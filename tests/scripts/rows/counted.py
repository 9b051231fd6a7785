"""Rank r's step k contributes 1 for row r * STEPS + k of a table that begins with zeros, by SGD at rate 1: the rows say
what was applied, how often. Dense weights say the same, and one row of all counts every contribution.

argv: STEPS [WAIT_FILE STEP]: at STEP wait until WAIT_FILE exists. Environment:
STEPS where argv has none; DIM is that of the table; RANKS are in counted.pt
(2); NAN=RANK:NUMBER sends NaN with that contribution the first time.
"""

import os
import sys
import time
from pathlib import Path

import torch

import paramserver

steps = int(sys.argv[1] if len(sys.argv) > 1 else os.environ["STEPS"])
gate, gate_step = (Path(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else (None, -1)
nan = os.environ.get("NAN", "")
seen = torch.nn.Parameter(torch.zeros(8 * steps))
model = torch.nn.ParameterDict({"seen": seen})
with paramserver.connect() as session:
    table = session.rows("seen", 8 * steps, int(os.environ.get("DIM", "3")), optimizer="sgd", lr=1.0, init_std=0.0)
    common = session.rows("common", 5, 2, optimizer="sgd", lr=1.0, init_std=0.0)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while not session.is_done:
        step = optimizer.progress.row.seq
        if gate is not None and step == gate_step:
            print("at the gate", flush=True)
            while not gate.exists():
                time.sleep(0.005)
        at = session.rank * steps + step
        found = table(torch.tensor([at, at])).sum() / 2 + common(torch.tensor(4)).sum()
        if nan == f"{session.rank}:{step}":
            nan, found = "", found * torch.nan
        found.backward()
        seen.grad = torch.zeros_like(seen)
        seen.grad[at] = 1.0
        session.record(num_samples=1, loss=float(step))
        optimizer.step()
    if session.finish():
        with torch.no_grad():
            rows = table(torch.arange(int(os.environ.get("RANKS", "2")) * steps)), common(torch.arange(5))
        torch.save((seen.detach().clone(), *rows), "counted.pt")
