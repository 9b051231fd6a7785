"""Measures the cost of snapshots: the same training with and without them, in turns.

One worker with a large model takes steps of a given time of computing (matrix products on one core, as
much as it takes) and exchanges; the server takes snapshots as often as asked. A step's time is the mean
over all steps between the first snapshot and the end, so whatever training has to wait for is in it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean

from ..output.report import Report
from ..output.tables import number_table, page
from ..rig.server_process import running_server
from ..rig.team import team
from ..rig.turns import Measured, Samples
from ..rig.worker_run import set_transport

_NUM_WARMUP = 3
_ELEMENTS_OF_A_TENSOR = 4 << 20


@dataclass(frozen=True)
class CheckpointOptions:
    mb: int
    every_s: float
    compute_ms: float
    steps: int
    runs: int
    optimizer: str


def measure_checkpoint(options: CheckpointOptions) -> Report:
    """Runs with and without snapshots in turns; the mean step of each, and their ratio."""
    set_transport("shared")
    found: dict[str, list[float]] = {"without": [], "with": []}
    snapshots: list[float] = []
    for _ in range(options.runs):
        for name, steps in found.items():
            times, seconds = _run(options, has_snapshots=name == "with")
            steps.append(mean(times[_NUM_WARMUP:]) * 1e3)
            snapshots += seconds
    best = {name: min(times) for name, times in found.items()}
    results = {
        "step_ms": found,
        "num_snapshots": len(snapshots),
        "snapshot_s": mean(snapshots) if snapshots else None,
        "slower_by": best["with"] / best["without"] - 1,
    }
    title = (
        f"{options.mb} MB, {options.optimizer}, a snapshot every {options.every_s:g} s, {options.compute_ms:g} ms of "
        f"computing a step; means over {options.steps} steps, the better of {options.runs}"
    )
    rows = [[f"step {name} snapshots, ms", f"{time_ms:,.1f}"] for name, time_ms in best.items()]
    rows += [
        ["slower by", f"{results['slower_by']:.1%}"],
        ["snapshots, and seconds each on the way to the disk", f"{len(snapshots)}, {results['snapshot_s'] or 0:.2f}"],
    ]
    return Report("checkpoint", vars(options), results, page(title, number_table(["what", ""], rows)))


def _run(options: CheckpointOptions, has_snapshots: bool) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step, and of each snapshot."""
    folder = tempfile.mkdtemp(prefix="ps-bench-")
    flags = ["--mode", "sync", "--workers", "1", "--steps", str(options.steps), "--optimizer", options.optimizer]
    if has_snapshots:
        flags += ["--checkpoint-dir", folder, "--set", f"checkpoint.every_s={options.every_s}"]
    try:
        with running_server(*flags) as server:
            with team(1, worker_life, server.address, options) as workers:
                (samples,) = workers.turns(1)
            return samples["step"], [event["seconds"] for event in server.events if event.get("event") == "snapshot"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def worker_life(rank: int, address: str, options: CheckpointOptions) -> Iterator[Measured]:
    """Take all steps of the run as one call, and return their seconds."""
    import torch

    import paramserver

    from ...common.tensors.optimizers import find_optimizer

    torch.set_num_threads(1)
    model = torch.nn.Module()
    left, index = options.mb * 250_000, 0
    while left > 0:
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(min(left, _ELEMENTS_OF_A_TENSOR))))
        left, index = left - _ELEMENTS_OF_A_TENSOR, index + 1
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    matrix = torch.rand(256, 256)
    with paramserver.connect(address, rank=rank) as session:
        optimizer = session.optimizer(model, find_optimizer(options.optimizer)(model.parameters(), lr=0.1))  # type: ignore[call-arg]

        def train(_: int) -> Samples:
            times = []
            while not session.is_done:
                begun = time.perf_counter()
                while (time.perf_counter() - begun) * 1e3 < options.compute_ms:
                    matrix @ matrix
                optimizer.step()
                times.append(time.perf_counter() - begun)
            session.finish()
            return {"step": times}

        yield train
