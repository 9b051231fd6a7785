"""What each process holds of a model that is trained with Adam: parameters, gradients, what the optimizer remembers.

Stages as in ZeRO (Rajbhandari et al. 2020): 0 all of it in each worker, 1 the optimizer's state divided among workers
that average among themselves (`worker.zero_copies` 1), 3 all three divided among the processes of one worker
(`fully_shard`, mode localsgd, in which workers step themselves). Counted are the bytes of the tensors between backward
and step, of the process that has most. Beside them by how much the resident memory of a process has grown at most since
torch was loaded (VmHWM), with all else: batches, activations, buckets, what FSDP2 has gathered.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...output.machine import memory_of
from ...output.report import Report
from ...output.tables import number_table, page
from ...rig.server_process import running_server
from ...rig.team import stay_on, team
from ...rig.turns import Measured, Samples

_NUM_STEPS = 3
_FEATURES = 64
_LEARNING_RATE = 1e-4
HELD = ("parameters", "gradients", "optimizer")
STAGES = (0, 1, 3)
_ALL_DIVIDED = 3


@dataclass(frozen=True)
class ZeroOptions:
    mb: int
    workers: list[int]
    stages: list[int]


def measure_zero(options: ZeroOptions) -> Report:
    """Measure one run for each stage and number of processes."""
    runs = [
        {"stage": stage, "workers": workers} | _of_run(options.mb, stage, workers)
        for stage in options.stages
        for workers in options.workers
    ]
    return Report("zero", vars(options) | {"steps": _NUM_STEPS}, {"runs": runs}, _table(options, runs))


def _of_run(mb: int, stage: int, workers: int) -> dict[str, float]:
    """Returns the MB of each part, of the process that has most of it."""
    mode = ("allreduce", str(workers)) if stage != _ALL_DIVIDED else ("localsgd", "1")
    flags = ("--set", "policy.local_steps=1") if stage == _ALL_DIVIDED else ()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        running_server("--mode", mode[0], "--workers", mode[1], "--steps", str(_NUM_STEPS + 1), *flags) as server,
        team(workers, held_life, server.address, stage, workers, mb, port) as members,
    ):
        found = members.turns(_NUM_STEPS)
    megabytes = [{part: values[-1] / 1e6 for part, values in samples.items()} for samples in found]
    most = {f"{part}_mb": max(number[part] for number in megabytes) for part in (*HELD, "peak")}
    most["least_peak_mb"] = min(number["peak"] for number in megabytes)
    return most | {"held_mb": max(sum(number[part] for part in HELD) for number in megabytes)}


@contextmanager
def held_life(rank: int, address: str, stage: int, workers: int, mb: int, port: int) -> Iterator[Measured]:
    """A worker, or one of the processes of one; parts are bytes."""
    stay_on("lo")
    os.environ |= {"PS_WORKER__ZERO": str(stage), "PS_WORKER__ZERO_COPIES": "1"}
    if stage == _ALL_DIVIDED:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "PS_WORKER__GROUP": "true"}
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F

    import paramserver

    from ....common.config.schema import LogConfig
    from ....common.reporting.log import setup_logging
    from ....worker.strategies.collectives.zero import Zero

    setup_logging(LogConfig(level="warning"), "ps-bench")
    torch.set_num_threads(1)
    before = memory_of(os.getpid())["peak"]
    torch.manual_seed(0)
    model = _model(mb)
    if stage == _ALL_DIVIDED:
        dist.init_process_group("gloo")
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    inputs = torch.randn(2, _FEATURES, generator=torch.Generator().manual_seed(rank))
    with paramserver.connect(address, rank=0 if stage == _ALL_DIVIDED else rank) as session:
        inner = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
        optimizer = session.optimizer(model, inner)
        parameters = list(model.parameters())

        def measured(count: int) -> Samples:
            found: dict[str, int] = {}
            for _ in range(count):
                optimizer.zero_grad()
                F.mse_loss(model(inputs), inputs).backward()
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                found = {"parameters": _num_bytes(parameters), "gradients": _num_bytes(gradients)}
                optimizer.step()
            strategy = session._strategy
            divided = strategy._step.state if isinstance(strategy, Zero) else {}
            states = [*inner.state.values(), *divided.values()]
            found["optimizer"] = _num_bytes(value for state in states for value in state.values())
            found["peak"] = memory_of(os.getpid())["peak"] - before
            return {part: [float(value)] for part, value in found.items()}

        yield measured


def _model(mb: int) -> Any:
    """Layers of as many rows as columns, a stack between two of `_FEATURES`; about so many MB."""
    from torch import nn

    width, layers = 512, max(1, round(mb * 1e6 / 4 / 512**2))
    inside = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(_FEATURES, width), *inside, nn.Linear(width, _FEATURES))


def _num_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes in this process."""
    here = (
        tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for tensor in tensors
        if hasattr(tensor, "dim") and tensor.dim()
    )
    return sum(tensor.numel() * tensor.itemsize for tensor in here)


def _table(options: ZeroOptions, runs: list[dict[str, Any]]) -> Any:
    whole = {run["workers"]: run for run in runs if run["stage"] == 0}
    columns = ["stage", "N", *(f"{part} MB" for part in HELD), "sum MB", "optimizer, sum of stage 0", "1/N"]
    columns += ["peak MB, most and least"]
    rows = []
    for run in runs:
        zero = whole.get(run["workers"])
        of = "" if zero is None else ", ".join(f"{run[key] / zero[key]:.4f}" for key in ("optimizer_mb", "held_mb"))
        megabytes = [f"{run[f'{part}_mb']:,.2f}" for part in (*HELD, "held")]
        more = [f"{1 / run['workers']:.4f}", f"{run['peak_mb']:,.0f}, {run['least_peak_mb']:,.0f}"]
        rows.append([str(run["stage"]), str(run["workers"]), *megabytes, of, *more])
    title = f"Adam, a model of {options.mb} MB in float32: what the process with most holds"
    return page(title, number_table(columns, rows))
