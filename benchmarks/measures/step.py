"""A training step of a real task, divided: compute, transfer, wait, apply; and what traffic alone predicts.

Real workers, each a process, train the task by the public API. On a worker's clock a step is compute
(data, forward, backward) and `optimizer.step()`, which includes the reply's `gate_wait` in the server
(Reply.gate_wait_s). The rest is transfer. The least gate wait of all workers in the same step is
apply: fold and optimizer, which every worker needs; the rest of the gate wait is waiting for others.

The predictions divide bytes by what one plain TCP stream carries (bandwidth.py): M up and M down
for each worker of a parameter server whose link is not shared, N times that where all workers share
it, as over loopback; and 2 M (N - 1) / N for a ring all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from ..output.machine import machine
from ..output.report import Report, median
from ..output.tables import number_table, page
from ..rig.bandwidth import stream_bytes_per_s
from ..rig.moments import Watch
from ..rig.ours import transports_of
from ..rig.server_process import running_server
from ..rig.team import team
from ..rig.turns import Measured, Samples
from ..rig.worker_run import set_transport

_NUM_WARMUP = 3
_LEARNING_RATE = 1e-3
_PARTS = ("compute", "transfer", "wait", "apply")


@dataclass(frozen=True)
class StepOptions:
    task: str
    workers: int
    steps: int
    batch_size: int
    mode: str
    optimizer: str
    transport: str


def measure_step(options: StepOptions) -> Report:
    """Measure one run for each transport."""
    found = {transport: _run(options, transport) for transport in transports_of(options.transport)}
    num_bytes = next(iter(found.values()))[0]["bytes"][0]
    bytes_per_s = stream_bytes_per_s()
    transports = {transport: summed_up(samples) for transport, samples in found.items()}
    results = {
        "payload_mb": num_bytes / 1e6,
        "stream_gb_s": bytes_per_s / 1e9,
        "transports": transports,
        "predicted_ms": {
            name: value / bytes_per_s * 1e3 for name, value in traffic(num_bytes, options.workers).items()
        },
    }
    return Report("step", vars(options), results, _table(options, results))


def traffic(payload_bytes: float, num_workers: int) -> dict[str, float]:
    """Returns the bytes through the narrowest link in a synchronous step."""
    return {
        "parameter_server": 2 * payload_bytes,
        "parameter_server_shared_link": 2 * payload_bytes * num_workers,
        "ring_all_reduce": 2 * payload_bytes * (num_workers - 1) / num_workers,
    }


def summed_up(found: list[Samples]) -> list[dict[str, float]]:
    """Returns by rank: medians in ms of a step's parts, and the share of the step that is not compute."""
    applied = [min(waits) for waits in zip(*(samples["gate_wait"] for samples in found), strict=True)]
    return [_of_worker(samples, applied) for samples in found]


def _of_worker(samples: Samples, applied: list[float]) -> dict[str, float]:
    parts = {
        "compute": samples["compute"],
        "transfer": samples["transfer"],
        "wait": [wait - apply for wait, apply in zip(samples["gate_wait"], applied, strict=True)],
        "apply": applied,
    }
    steps = [sum(part) for part in zip(*parts.values(), strict=True)]
    overhead = [1 - compute / step for compute, step in zip(parts["compute"], steps, strict=True)]
    found = {f"{part}_ms": median(times) * 1e3 for part, times in parts.items()}
    return found | {"step_ms": median(steps) * 1e3, "overhead": median(overhead)}


def _run(options: StepOptions, transport: str) -> list[Samples]:
    set_transport(transport)
    num_steps = str(_NUM_WARMUP + options.steps)
    flags = ["--mode", options.mode, "--workers", str(options.workers), "--steps", num_steps]
    with (
        running_server(*flags, "--optimizer", options.optimizer, "--lr", str(_LEARNING_RATE)) as server,
        team(options.workers, worker_life, server.address, options) as workers,
    ):
        return workers.turns(1)


@contextmanager
def worker_life(rank: int, address: str, options: StepOptions) -> Iterator[Measured]:
    """The whole training of one worker is one call; parts compute, transfer and gate_wait of every step, and bytes."""
    import torch

    import paramserver

    from ...common.config.schema import LogConfig
    from ...common.reporting.log import setup_logging
    from ...common.tensors.optimizers import find_optimizer
    from ...worker.tensors.transfer import ModelTensors
    from ...worker.training.tasks.loading import load_task

    setup_logging(LogConfig(level="warning"), "ps-bench")
    torch.set_num_threads(max(1, machine()["cores"] // options.workers))
    with paramserver.connect(address, rank=rank) as session:
        task = load_task(options.task, {}, seed=session.settings.seed, device=torch.device("cpu"))
        torch.manual_seed(session.settings.seed)
        model = task.model()
        data = task.train_data()
        model.train()
        cls: Any = find_optimizer(options.optimizer)
        optimizer = session.optimizer(model, cls(model.parameters(), lr=_LEARNING_RATE))
        yield (
            lambda count: (
                _train(session, task, model, optimizer, data, options.batch_size)
                | {"bytes": [float(ModelTensors(model).layout.exchange_bytes)]}
            )
        )


def _train(session: Any, task: Any, model: Any, optimizer: Any, data: Any, batch_size: int) -> Samples:
    found: Samples = {"compute": [], "transfer": [], "gate_wait": []}
    resumed = time.perf_counter()
    watch, moments = Watch(session), None
    for batch in session.shard(data, batch_size, epochs=None):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        computed = time.perf_counter()
        optimizer.step()
        done = time.perf_counter()
        last, moments = moments, watch.last
        gate_wait_s = (
            moments.gate_wait_s if moments is not None and moments is not last else 0.0
        )  # between two rounds nothing is exchanged
        found["compute"].append(computed - resumed)
        found["gate_wait"].append(gate_wait_s)
        found["transfer"].append(done - computed - gate_wait_s)
        resumed = done
    session.finish()
    return {part: times[_NUM_WARMUP:] for part, times in found.items()}


def _table(options: StepOptions, results: dict[str, Any]) -> RenderableType:
    rows = [
        [
            f"{transport}, rank {rank}",
            *(f"{worker[f'{part}_ms']:,.2f}" for part in (*_PARTS, "step")),
            f"{worker['overhead']:.0%}",
        ]
        for transport, workers in results["transports"].items()
        for rank, worker in enumerate(workers)
    ]
    predicted = results["predicted_ms"]
    ring = "2 M (N - 1) / N, a ring all-reduce"
    formulas = {
        "2 M, a parameter server, a link for each worker": predicted["parameter_server"],
        "2 M N, the same, one link for all": predicted["parameter_server_shared_link"],
        ring: predicted["ring_all_reduce"],
        **{
            f"measured transfer, {transport}, the slowest worker": max(worker["transfer_ms"] for worker in workers)
            for transport, workers in results["transports"].items()
        },
    }
    title = (
        f"{options.task}, {options.workers} workers, {options.mode}, {options.optimizer}, "
        f"batches of {options.batch_size}; {options.steps} steps, medians"
    )
    traffic_title = (
        f"M = {results['payload_mb']:,.3f} MB, N = {options.workers}; {results['stream_gb_s']:.2f} GB/s a stream"
    )
    return page(
        title,
        number_table(["ms", *_PARTS, "step", "not compute"], rows),
        "",
        number_table([traffic_title, "ms"], [[name, f"{ms:,.3f}"] for name, ms in formulas.items()]),
    )
