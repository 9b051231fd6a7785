"""A script of allreduce, of whose processes the test names one at a time to be killed in the middle of a reduction:

    python reducing.py FOLDER

FOLDER/kill.NUMBER has a rank and a share: that rank kills itself when so much of the time that a reduction takes has
passed in its next one, and says when in FOLDER/dead.NUMBER. FOLDER/steps.RANK has when each step() began and ended.
The run ends for all when there is FOLDER/enough. Gradients are one direction times a number of (rank, contribution).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from statistics import median

import torch

import paramserver
from paramserver.worker.strategies.group import Group

SIZE, MOMENTUM, LR = 500_000, 0.9, 0.01


def direction() -> torch.Tensor:
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def slope(rank: int, number: int) -> tuple[float, int]:
    """Of a contribution, and from how many samples."""
    return ((7919 * number + 104729 * rank) % 1009) / 1009 - 0.5, 1 + (number + rank) % 5


def die(folder: Path, number: int, after_s: float) -> None:
    time.sleep(after_s)
    (folder / f"dead.{number}").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    took: list[float] = []  # reductions, s
    armed: list[tuple[int, float]] = []  # number of the kill, share of a reduction
    began: list[float] = []
    begin, end = Group._begin_sum, Group._end_works

    def begin_sum(group: Group, tensor: torch.Tensor) -> None:
        if tensor.numel() >= SIZE:
            if armed:
                number, share = armed.pop()
                after_s = share * median(took[-20:] or [0.005])
                threading.Thread(target=die, args=(folder, number, after_s), daemon=True).start()
            began.append(time.perf_counter())
        begin(group, tensor)

    def end_works(group: Group) -> None:
        end(group)
        if began:
            took.append(time.perf_counter() - began.pop())
            began.clear()

    Group._begin_sum, Group._end_works = begin_sum, end_works  # type: ignore[method-assign]
    model = torch.nn.ParameterList([torch.zeros(SIZE, dtype=torch.float64)])
    (parameter,) = model.parameters()
    number = 0
    with paramserver.connect() as session, (folder / f"steps.{os.environ['RANK']}").open("a") as steps:
        optimizer = session.optimizer(model, torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM))
        while (folder / f"dead.{number}").exists():
            number += 1
        while not session.is_done:
            if (folder / f"dead.{number}").exists():
                number += 1
            plan = folder / f"kill.{number}"
            if plan.exists() and not armed and (command := plan.read_text().split())[0] == str(session.rank):
                armed.append((number, float(command[1])))
            if (folder / "enough").exists():
                session.stop("enough")
            found, weight = slope(session.rank, optimizer.progress.row.seq + 1)
            parameter.grad = direction() * found
            session.record(num_samples=weight, loss=0.0)
            at = time.time()
            optimizer.step()
            steps.write(f"{at} {time.time()}\n")
            steps.flush()
            time.sleep(0.005)  # what a step computes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
