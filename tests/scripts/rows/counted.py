"""Rank r's step k contributes 1 for row r * STEPS + k of a table that begins with zeros, by SGD at rate 1: the rows say
what was applied, how often. Dense weights say the same, and one row of all counts every contribution.

argv: STEPS [WAIT_FILE STEP]: at STEP wait until WAIT_FILE exists. Environment: DIM is that of the table;
NAN=RANK:NUMBER sends NaN with that contribution the first time. Rows of two ranks are in counted.pt.
"""

import os
import sys

import torch

import paramserver
from paramserver.tests.gates import Gate

steps = int(sys.argv[1])
gate = Gate(*sys.argv[2:])
nan = os.environ.get("NAN", "")
seen = torch.nn.Parameter(torch.zeros(8 * steps))
model = torch.nn.ParameterDict({"seen": seen})
with paramserver.connect() as session:
    table = session.rows("seen", 8 * steps, int(os.environ.get("DIM", "3")), optimizer="sgd", lr=1.0, init_std=0.0)
    common = session.rows("common", 5, 2, optimizer="sgd", lr=1.0, init_std=0.0)
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while not session.is_done:
        step = optimizer.progress.row.seq
        gate.wait(step)
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
            rows = table(torch.arange(2 * steps)), common(torch.arange(5))
        torch.save((seen.detach().clone(), *rows), "counted.pt")
