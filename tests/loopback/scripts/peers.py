"""A small network on gradients that (rank, number) and the weights say, of 3 + rank samples each: a worker among peers,
and what a test makes the reference of. argv: sgd|momentum|adam WORDS: what goes wrong in it, or what else it does.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paramserver.tests.gates import Gate

Versions = list[list[tuple[int, ...]]]  # (rank, number, base version) of the contributions of each version
Encode = Callable[[int, list[torch.Tensor]], list[torch.Tensor]]


def make(kind: str = "adam", seed: int = 0, width: int = 3) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Linear(20, width)).double()
    if kind == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if kind == "momentum" else 0.0)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def gradients(rank: int, number: int, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of a rank's contribution that was computed on these weights."""
    chance = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(item.shape, generator=chance, dtype=item.dtype) + 0.3 * item.detach() for item in weights]


def reference(
    versions: Versions, kind: str = "adam", has_schedule: bool = False, encode: Encode = lambda rank, item: item
) -> dict[str, torch.Tensor]:
    """The weights that come of these contributions in one process. Without a base, each is on the newest weights."""
    model, optimizer = make(kind)
    schedule = schedule_of(optimizer) if has_schedule else None
    kept = [[item.detach().clone() for item in model.parameters()]]
    for contributions in versions:
        total = sum(3 + rank for rank, *_ in contributions)
        sums = [torch.zeros_like(item) for item in model.parameters()]
        for rank, number, *base in contributions:
            found = encode(rank, gradients(rank, number, kept[base[0] if base else -1]))
            for item, gradient in zip(sums, found, strict=True):
                item.add_(gradient, alpha=(3 + rank) / total)
        for item, mean in zip(model.parameters(), sums, strict=True):
            item.grad = mean
        optimizer.step()
        if schedule is not None:
            schedule.step()
        kept.append([item.detach().clone() for item in model.parameters()])
    return model.state_dict()


def main() -> None:
    import paramserver
    from paramserver.worker.conversation.exchange import Exchange
    from paramserver.worker.strategies.collectives.zero import ShardedTransfer
    from paramserver.worker.strategies.group import Group

    kind, *words = sys.argv[1:]
    gates = [Gate("one", "11"), Gate("two", "21")]
    if "patient" in words:
        Group.__init__.__defaults__ = *Group.__init__.__defaults__[:-2], 1000.0, 1000.0  # type: ignore[index, misc]

    def dies_in(owner: type, name: str, seq: int) -> None:
        call = getattr(owner, name)

        def dying(*arguments: Any) -> Any:
            if optimizer.progress.row.seq == seq:
                os.kill(os.getpid(), 9)
            return call(*arguments)

        setattr(owner, name, dying)

    if "dies with the mean" in words:  # of the tenth step, and so have the others
        dies_in(Exchange, "contribute", 9)
    if "dies with its share" in words:  # the eighth counts, and others wait for what has been stepped here
        dies_in(ShardedTransfer, "spread", 8)
    with paramserver.connect() as session:
        model, inner = make(kind, session.rank if "other" in words else 0, 4 if "wider" in words else 3)
        parameters = list(model.parameters())
        if "begun" in words:
            for item in parameters:
                item.grad = torch.ones_like(item)
            inner.step()
        optimizer = session.optimizer(model, inner)
        schedule = schedule_of(inner) if "schedule" in words else None
        if "evaluates" in words:
            session.evaluate(lambda model: {"norm": sum(float(item.norm()) for item in model.parameters())}, every=5)
        while not session.is_done:
            number = session.step + 1 if "steps" in words else optimizer.progress.next_number
            if "leaves" in words:
                gates[session.rank != 2].wait(number)
            for item, gradient in zip(parameters, gradients(session.rank, number, parameters), strict=True):
                item.grad = gradient
            if number == 5 and "rate" in words:
                optimizer.param_groups[0]["lr"] = 0.005
            if number == 5 and "nan" in words:
                model[1].bias.grad[1] = float("nan")  # type: ignore[index]
            if number == 5 and "changes" in words:
                model[1].weight.data.mul_(2)  # type: ignore[operator]
            if number == 5 and "dies after a snapshot" in words:
                while not list(Path("kept").glob("snapshot-00000000000[24]-*")):
                    time.sleep(0.01)
                os.kill(os.getpid(), 9)
            session.record(num_samples=3 + session.rank, loss=0.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if "thirty" in words and number == 30:
                break
        session.finish()


if __name__ == "__main__":
    main()
