"""Workers that average among themselves as contestants: an all-reduce by size, and a training step in its parts.

An all-reduce here is what a member of a group of ours does with its gradients: they are gathered from their tensors,
weighted by samples, and the mean is left in memory beside them (`worker/strategies/group.py`). A step is one of a
transformer of real layers, forward, backward and `optimizer.step()`, each timed: what is not computing is in all three,
where gradients travel during backward and several processes share the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from .turns import Measured, Samples

PARTS = ("forward", "backward", "step")
_LEARNING_RATE = 1e-4
_AT_LEAST_BYTES = 10_000_000  # that one sample passes: a small all-reduce is repeated
_MOST_REPEATED = 100


@dataclass(frozen=True)
class StepSize:
    """A transformer, 12 width² parameters a layer and 512 width besides, and the bytes that it reads in a step."""

    layers: int
    width: int
    batch_size: int
    context: int


def by_size(calls: Mapping[int, Callable[[], object]]) -> Measured:
    """Parts are sizes in bytes, each the time of one call; small ones are the mean of several in a row."""

    def measured(count: int) -> Samples:
        found: Samples = {str(size): [] for size in calls}
        for _ in range(count):
            for size, call in calls.items():
                repeats = min(_MOST_REPEATED, max(1, _AT_LEAST_BYTES // size))
                began = time.perf_counter()
                for _ in range(repeats):
                    call()
                found[str(size)].append((time.perf_counter() - began) / repeats)
        return found

    return measured


@contextmanager
def group_life(rank: int, store: str, workers: int, sizes: Sequence[int]) -> Iterator[Measured]:
    """A member of groups of ours, which average models of these sizes (bytes)."""
    import torch.distributed as dist

    from ...worker.strategies.group import Generation, Group, Rendezvous
    from .model import fill_gradients, synthetic_model

    share_cores(workers)
    rendezvous = Rendezvous("127.0.0.1")
    file_store = dist.FileStore(store.removeprefix("file://"), workers)
    if rank == 0:
        file_store.set("port", str(rendezvous.address[1]))
    store_at = ("127.0.0.1", int(file_store.get("port")))
    groups, calls = [], {}
    for number, size in enumerate(
        sizes
    ):  # one for each model, as in a run: what was averaged last says how the next goes
        group = Group(Generation(number, tuple(range(workers)), store_at), rank, rendezvous)
        model = synthetic_model(size // 4)
        fill_gradients(model)
        calls[size] = partial(group.average, [parameter.grad for parameter in model], 1)
        groups.append(group)
    yield by_size(calls)
    for group in groups:
        group.close()
    rendezvous.close()


@contextmanager
def alone_life(rank: int, size: StepSize) -> Iterator[Measured]:
    """Compute without averaging, beside as many others."""
    import torch

    model, batch = transformer(size, rank)
    yield step_parts(model, batch, torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, fused=True))


@contextmanager
def joined_life(rank: int, address: str, size: StepSize) -> Iterator[Measured]:
    """Run a worker of the run at `address`."""
    os.environ["PS_WORKER__OVERLAP"] = "true"  # as a worker with a task has it
    import torch

    import paramserver

    from ...common.config.schema import LogConfig
    from ...common.reporting.log import setup_logging

    setup_logging(LogConfig(level="warning"), "ps-bench")
    model, batch = transformer(size, rank)
    with paramserver.connect(address, rank=rank) as session:
        inner = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, fused=True)
        yield step_parts(model, batch, session.optimizer(model, inner))


def share_cores(processes: int) -> None:
    """Give this process's torch its part of the cores, as ps-launch and torchrun do."""
    import torch

    from ..output.machine import machine

    torch.set_num_threads(max(1, machine()["cores"] // processes))


def transformer(size: StepSize, rank: int) -> tuple[Any, Any]:
    """A model, the same on all ranks, and a rank's batch, uint8 [batch_size, context + 1]."""
    import torch

    from ...worker.tasks.gpt import Transformer

    share_cores(2)
    torch.manual_seed(0)
    model = Transformer(num_layers=size.layers, num_heads=8, width=size.width)
    generator = torch.Generator().manual_seed(rank)
    return model, torch.randint(0, 256, (size.batch_size, size.context + 1), generator=generator)


def step_parts(model: Any, batch: Any, optimizer: Any) -> Measured:
    """Returns the parts forward, backward, step and whole."""
    from torch.nn import functional as F

    def measured(count: int) -> Samples:
        found: Samples = {part: [] for part in (*PARTS, "whole")}
        for _ in range(count):
            times = [time.perf_counter()]
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            optimizer.step()
            times.append(time.perf_counter())
            for part, begun, ended in zip(PARTS, times, times[1:], strict=False):
                found[part].append(ended - begun)
            found["whole"].append(times[-1] - times[0])
        return found

    return measured
