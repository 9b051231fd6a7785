"""How much memory the server takes at its peak, beside the sum of what it has to hold; and the worker's.

The server's peak is the kernel's (VmHWM) less what the same process held before a model came; its
anonymous and shared memory are sampled, so a short peak of one of them may be missed. The sum is the
parameters, the optimizer's state (where workers contribute gradients), the mean being formed, encoded
replies (one where a round's workers get the same, else up to server.max_replies, never more than
workers), and uploads: as many as server.max_staged allows, or in the shared-memory transport every
worker's own, which the server only maps. The mean is an upload that has left the staging pool, so
the sum counts it beside them.

The worker's metric is its peak less that of a process which has the same model, gradients (where its
own optimizer steps, that one's state) and programs loaded but no server: in copies of the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from ....common.config.schema import ServerConfig
from ....common.registry import MODES
from ...output.machine import memory_of
from ...output.report import Report, median
from ...output.tables import number_table, page
from ...rig.ours import transports_of
from ...rig.server_process import running_server
from ...rig.team import team
from ...rig.turns import Measured, Samples
from ...rig.worker_run import joined_worker

_NUM_STEPS = 6
_SAMPLE_S = 0.02
_LOCAL_STEPS = 1  # every step of every mode is an exchange
_PARTS = ("parameters", "optimizer", "mean", "uploads", "replies")


@dataclass(frozen=True)
class MemoryOptions:
    mb: int
    workers: list[int]
    modes: list[str]
    optimizer: str
    transport: str

    @property
    def num_floats(self) -> int:
        return self.mb * 1_000_000 // 4


def measure_memory(options: MemoryOptions) -> Report:
    """Measure one run for each mode, transport and number of workers."""
    payload = options.num_floats * 4
    bare = {steps: _bare_worker(options, steps) for steps in {steps_itself(mode) for mode in options.modes}}
    runs = []
    for mode in options.modes:
        for transport in transports_of(options.transport):
            for workers in options.workers:
                parts = expected_parts(mode, options.optimizer, workers, transport)
                found = _run(options, mode, workers, transport)
                runs.append(
                    {"mode": mode, "transport": transport, "workers": workers}
                    | _row(found, parts, payload, bare[steps_itself(mode)])
                )
    config = {**vars(options), "steps": _NUM_STEPS, "max_staged": ServerConfig().max_staged}
    config["max_replies"] = ServerConfig().max_replies
    results = {"runs": runs}
    return Report("memory", config, results, _table(options, runs))


def expected_parts(mode: str, optimizer: str, workers: int, transport: str) -> dict[str, float]:
    """Returns the server's necessary memory, in payloads."""
    policy, limits = MODES.load(mode), ServerConfig()
    return {
        "parameters": 1,
        "optimizer": 0 if steps_itself(mode) else state_payloads(optimizer),
        "mean": 1,
        "uploads": workers if transport == "shared" else min(limits.max_staged, workers),
        "replies": 1 if policy.has_rounds else min(limits.max_replies, workers),
    }


def steps_itself(mode: str) -> bool:
    """Returns whether a worker's optimizer steps, and so has state."""
    return bool(MODES.load(mode).kind.worker_steps and not MODES.load(mode).kind.may_lose)


def state_payloads(optimizer: str) -> float:
    """Returns the size of an optimizer's state in parameters, measured on a small model."""
    import torch

    from ....common.tensors.optimizers import find_optimizer

    cls: Any = find_optimizer(optimizer)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.ones(1000)
    tried = cls([parameter], lr=1e-3)
    tried.step()
    state = [value for value in tried.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() for value in state) // parameter.numel()


def _run(options: MemoryOptions, mode: str, workers: int, transport: str) -> dict[str, float]:
    """Bytes of the server (before, peak, anonymous, shared) and of the workers' median (worker_...)."""
    flags = ("--mode", mode, "--workers", str(workers), "--steps", str(_NUM_STEPS + 1))
    arguments = (options.num_floats, options.optimizer, transport)
    with running_server(*flags, "--set", f"policy.local_steps={_LOCAL_STEPS}") as server:
        address = server.address
        before = memory_of(server.pid)
        with sampled(server.pid) as peaks, team(workers, worker_life, address, *arguments) as members:
            of_workers = members.turns(1)
            peak = memory_of(server.pid)["peak"]
    return {
        "before": before["rss"],
        "peak": peak,
        "anonymous": peaks["anonymous"] - before["anonymous"],
        "shared": peaks["shared"] - before["shared"],
        "worker_peak": median([worker["peak"][0] for worker in of_workers]),
        "worker_anonymous": median([worker["anonymous"][0] for worker in of_workers]),
    }


@contextmanager
def sampled(pid: int) -> Iterator[dict[str, int]]:
    """The highest `anonymous` and `shared` bytes seen of a process, filled in while the block runs."""
    peaks, ended = {"anonymous": 0, "shared": 0}, threading.Event()

    def sample() -> None:
        while True:
            now = memory_of(pid)
            peaks.update({name: max(peaks[name], now[name]) for name in peaks})
            if ended.wait(_SAMPLE_S):
                return

    thread = threading.Thread(target=sample, name="memory-samples", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


@contextmanager
def worker_life(rank: int, address: str, num_floats: int, optimizer: str, transport: str) -> Iterator[Measured]:
    """Take all steps as one call; the parts peak and anonymous are bytes of this process."""
    with joined_worker(address, rank, num_floats, optimizer, "raw", transport) as worker:

        def measured(count: int) -> Samples:
            for _ in range(_NUM_STEPS):
                worker.optimizer.step()
            return _own_memory()

        yield measured


@contextmanager
def bare_life(_: int, num_floats: int, optimizer: str, steps: bool) -> Iterator[Measured]:
    """Measure a worker's memory without a server."""
    from ....common.tensors.optimizers import find_optimizer
    from ....worker import api  # noqa: F401  all that a worker loads
    from ...rig.model import fill_gradients, synthetic_model

    model = synthetic_model(num_floats)
    cls: Any = find_optimizer(optimizer)
    kept = cls(model.parameters(), lr=1e-4)
    fill_gradients(model)
    if steps:
        kept.step()
    yield lambda count: _own_memory()


def _bare_worker(options: MemoryOptions, steps: bool) -> dict[str, float]:
    with team(1, bare_life, options.num_floats, options.optimizer, steps) as member:
        found = member.turns(1)[0]
    return {name: values[0] for name, values in found.items()}


def _own_memory() -> Samples:
    now = memory_of(os.getpid())
    return {name: [float(now[name])] for name in ("peak", "anonymous")}


def _row(found: dict[str, float], parts: dict[str, float], payload: int, bare: dict[str, float]) -> dict[str, Any]:
    expected, model = sum(parts.values()) * payload, found["peak"] - found["before"]
    return {
        "before_mb": found["before"] / 1e6,
        "peak_mb": found["peak"] / 1e6,
        "model_mb": model / 1e6,
        "expected_mb": expected / 1e6,
        "ratio": model / expected,
        "anonymous_mb": found["anonymous"] / 1e6,
        "shared_mb": found["shared"] / 1e6,
        "bare_worker_mb": bare["peak"] / 1e6,
        "worker_copies": (found["worker_peak"] - bare["peak"]) / payload,
        "worker_anonymous_copies": (found["worker_anonymous"] - bare["anonymous"]) / payload,
        "expected_parts_mb": {name: count * payload / 1e6 for name, count in parts.items()},
    }


def _table(options: MemoryOptions, runs: list[dict[str, Any]]) -> RenderableType:
    columns = [
        "mode, transport, workers",
        *_PARTS,
        "sum",
        "peak",
        "peak / sum",
        "anonymous",
        "shared",
        "worker's copies",
    ]
    rows = [
        [
            f"{run['mode']}, {run['transport']}, {run['workers']}",
            *(f"{run['expected_parts_mb'][part]:,.0f}" for part in _PARTS),
            *(f"{run[key]:,.0f}" for key in ("expected_mb", "model_mb")),
            f"{run['ratio']:.2f}",
            *(f"{run[key]:,.0f}" for key in ("anonymous_mb", "shared_mb")),
            f"{run['worker_copies']:.2f}",
        ]
        for run in runs
    ]
    notes = [
        f"MB; before any model came the server held {runs[0]['before_mb']:,.0f} MB, which are not counted",
        "a worker's copies: its peak beyond a process with model and gradients alone, in models",
    ]
    return page(
        f"{options.mb:,} MB float32, {options.optimizer}: the server's memory", number_table(columns, rows), notes=notes
    )
