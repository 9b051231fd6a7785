"""Two tables of rows beside a dense model. With PLAIN=1 the same in plain torch: sparse embeddings, which it makes from
the tables' first values."""

import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver
from paramserver.tests.gates import Gate

BATCH, NAMES = int(os.environ["BATCH"]), ["sgd", "adagrad", "sparse_adam"]
SIZES = {"sgd": 60, "adagrad": 60, "sparse_adam": 3000}  # in the last, most rows are not touched
torch.manual_seed(0)
ids = torch.stack([torch.randint(0, SIZES[name], (240,)) for name in NAMES] + [torch.randint(0, 60, (240,))], 1)
y = (ids.sum(1) % 2).long()
model = nn.Sequential(nn.Linear(4 * 4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
dense = torch.optim.Adam(model.parameters(), lr=0.01)

with paramserver.connect() as session:
    rank, gate = session.rank, Gate("go", os.environ.get("GATE", ""))
    tables = {
        name: session.rows(name, SIZES[name], 4, optimizer=name, lr=0.1, init_std=0.5, dtype=torch.float64)
        for name in NAMES
    }
    optimizer = session.optimizer(model, dense)
    others = []
    if os.environ.get("PLAIN"):
        first = {name: tables[name](torch.arange(SIZES[name])).detach() for name in NAMES}
        made = {name: nn.Embedding(SIZES[name], 4, sparse=True, _weight=first[name]) for name in NAMES}
        tables, classes = made, (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
        others = [cls(table.parameters(), lr=0.1) for cls, table in zip(classes, tables.values(), strict=True)]
    schedules = [torch.optim.lr_scheduler.StepLR(other, 6, gamma=0.5) for other in (optimizer, *others[1:])]
    session.state(schedule=schedules[0])
    for step, (row, labels) in enumerate(session.shard(TensorDataset(ids, y), batch_size=BATCH, epochs=None)):
        if hasattr(optimizer, "progress"):  # a process that replaces another one does not begin at 0
            step = optimizer.progress.row.steps
        # One table is looked up twice, another in some steps only.
        found = [tables[name](row[:, at]) for at, name in enumerate(NAMES)]
        found.append(tables["sgd"](row[:, 3]))
        if step % 3 == 1:
            found[1] = torch.zeros_like(found[1])
        loss = F.cross_entropy(model(torch.cat(found, 1)), labels)
        optimizer.zero_grad()
        if others:
            others[0].param_groups[0]["lr"] = 0.1 if step < 4 else 0.03
        tables["sgd"].lr = 0.1 if step < 4 else 0.03  # by hand; the others follow the schedule
        for other in others:
            other.zero_grad()
        loss.backward()
        for other in others:
            other.step()
        session.record(loss=loss.item())
        gate.wait(step)
        if os.environ.get("DIE") == f"{rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    if session.finish():
        rows = {name: tables[name](torch.arange(SIZES[name])).detach().clone() for name in NAMES}
        torch.save({**model.state_dict(), **rows}, os.environ["OUT"])
