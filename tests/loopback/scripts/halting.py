"""onehot.py with a large second parameter; halts for ever in the middle of an exchange.

argv: STEPS WHERE STEP: in contribution STEP, after part of it was placed ("placing"), or of its reply
was read ("reading").
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import paramserver
from paramserver.worker.tensors.transfer import DirectTransfer

STEPS, WHERE, STEP = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
PADDING = 3_000_000  # 12 MB: it is made in more than one piece
counted = {"placing": 0, "reading": -1}  # the first weights come before the first contribution


def halt(where: str) -> None:
    if where == WHERE and counted[where] == STEP:
        print(f"halts {where}", flush=True)
        time.sleep(1000)


place, write = DirectTransfer.gather_into, DirectTransfer.write


def placing(self: DirectTransfer, *arguments: Any) -> Iterator[tuple[int, int]]:
    counted["placing"] += 1
    for start, end in place(self, *arguments):
        yield start, start + 64
        halt("placing")
        yield start + 64, end


def reading(self: DirectTransfer, offset: int, data: memoryview) -> None:
    write(self, offset, data)
    if offset == 0:
        counted["reading"] += 1
        halt("reading")


DirectTransfer.gather_into, DirectTransfer.write = placing, reading  # type: ignore[method-assign]

model = torch.nn.Module()
model.seen = torch.nn.Parameter(torch.zeros(8 * STEPS))
model.padding = torch.nn.Parameter(torch.zeros(PADDING))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while not session.is_done:
        model.seen.grad = torch.zeros_like(model.seen)
        model.seen.grad[session.rank * STEPS + optimizer.progress.row.seq] = 1.0
        model.padding.grad = torch.ones_like(model.padding)
        session.record(num_samples=1)
        optimizer.step()
    session.finish()
