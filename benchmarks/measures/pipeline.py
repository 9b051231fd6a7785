"""Measures stages of a pipeline: a step beside one process and beside bare torch, and a stage that is killed.

speed: two stages of equal layers, one thread each, beside one process with one thread and the same microbatches, and
beside torch.distributed.pipelining without a worker around it; in turns, of two processes the slower one. A step is
forward and backward of a batch, without optimizer and server.

faults: a process of a worker is killed; how long until the rank's next counted step, with two stages and with one
process; and the longest pause of the other worker meanwhile, beside its median step. Times are the server's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ...common.errors import ParamServerError
from ..baselines.gloo import process_group
from ..output.report import Report, median
from ..output.tables import number_table, page
from ..rig.server_process import clean_environment, undisturbed
from ..rig.team import measured_team, slowest, stay_on, team
from ..rig.turns import Contestant, Measured, measure, timed

PARTS = ("speed", "faults")
SCHEDULES = ("1F1B", "GPipe")  # with one stage in each process
SIZE = 2  # stages
_NUM_WARMUP = 3
_TASK = ("--task=gpt", "--set=task.args={num_layers: 4, num_heads: 2, width: 16, max_bytes: 60000, context: 16, "
         "eval_bytes: 2048}", "--batch-size=8", "--set=worker.microbatches=4", "--steps=100000")  # fmt: skip
_BASE_S = 0.2  # of a step in faults: the cores are free, so that other workers' steps show what they wait for
_COUNTED = 15  # steps before a process is killed, and after
_WAIT_S = 300.0


@dataclass(frozen=True)
class PipelineOptions:
    parts: Sequence[str]
    width: int
    layers: int
    batch_size: int
    microbatches: int
    schedule: str
    runs: int

    @property
    def ideal(self) -> float:
        """Speed-up of stages that are equal."""
        return SIZE * self.microbatches / (self.microbatches + SIZE - 1)


def measure_pipeline(options: PipelineOptions) -> Report:
    """Measure the parts one after another."""
    measures = {"speed": _speed, "faults": _faults}
    results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    results |= {part: measures[part](options) for part in options.parts}
    results["load_after"] = os.getloadavg()[0]
    return Report("pipeline", vars(options) | {"warmup": _NUM_WARMUP}, results, _table(options, results))


# ---- speed ------------------------------------------------------------------------------------


def _speed(options: PipelineOptions) -> dict[str, float]:
    contestants: dict[str, Callable[[], Contestant]] = {
        "one": partial(measured_team, 1, alone_life, options),
        "stages": partial(_stages, options),
        "bare": partial(measured_team, SIZE, bare_life, options),
    }
    found = measure(contestants, num_turns=options.runs, warmup=_NUM_WARMUP)
    times = {name: median(samples["step"]) for name, samples in found.items()}
    speed_up = times["one"] / times["stages"]
    return {
        **{f"{name}_ms": seconds * 1e3 for name, seconds in times.items()},
        "speed_up": speed_up,
        "of_ideal": speed_up / options.ideal,
        "bare_of_ideal": times["one"] / times["bare"] / options.ideal,
        "beside_bare": times["stages"] / times["bare"],
    }


@contextmanager
def _stages(options: PipelineOptions) -> Iterator[Measured]:
    with team(SIZE, stage_life, free_port(), options) as members:
        yield lambda count: slowest(members.turns(count))


def _layers(options: PipelineOptions) -> list[Any]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(options.width, options.width), nn.Tanh()) for _ in range(options.layers)]


def _batch(options: PipelineOptions) -> tuple[Any, Any]:
    import torch

    inputs = torch.randn(options.batch_size, options.width, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.roll(1, 1)


def _loss() -> Any:
    from torch.nn import functional as F

    return F.mse_loss


def _stepped(pipeline: Any, batch: tuple[Any, Any]) -> Measured:
    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(batch)

    return timed("step", step)


@contextmanager
def alone_life(_: int, store: str, workers: int, options: PipelineOptions) -> Iterator[Measured]:
    """One process, which accumulates the gradients of the microbatches."""
    from ...worker.training.pipeline import Pipeline, layers_of, loss_of

    module, layers = layers_of(_layers(options))
    yield _stepped(Pipeline(module, layers, loss_of(_loss()), options.microbatches), _batch(options))


@contextmanager
def stage_life(rank: int, port: int, options: PipelineOptions) -> Iterator[Measured]:
    """One of the processes of a worker."""
    _become_member(rank, port)
    from ...common.config.schema import LogConfig
    from ...common.config.sections.processes import WorkerConfig
    from ...common.kinds import ContributionKind
    from ...common.reporting.log import setup_logging
    from ...worker.replica_group.group import Group, find_member
    from ...worker.replica_group.pipeline import StagedPipeline
    from ...worker.training.pipeline import layers_of, loss_of

    setup_logging(LogConfig(level="warning"), "ps-bench")
    module, layers = layers_of(_layers(options))
    config = WorkerConfig(microbatches=options.microbatches, schedule=options.schedule)
    group = Group(find_member(os.environ), "cpu", {}, _WAIT_S)
    pipeline = StagedPipeline(module, layers, loss_of(_loss()), group, config, ContributionKind.GRADIENT)
    yield _stepped(pipeline, _batch(options))
    group.watch.end()


@contextmanager
def bare_life(rank: int, store: str, workers: int, options: PipelineOptions) -> Iterator[Measured]:
    """A process of torch's own pipeline: shapes given, no worker."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    each = options.layers // workers
    stage = nn.Sequential(*_layers(options)[rank * each : (rank + 1) * each])
    inputs, target = _batch(options)
    meta = torch.empty(options.batch_size // options.microbatches, options.width, device="meta")
    borders = [meta, meta.clone().requires_grad_(), meta.clone().requires_grad_()]
    with process_group(rank, store, workers):
        local = PipelineStage(stage, rank, workers, torch.device("cpu"), borders[rank], borders[rank + 1])
        schedule = get_schedule_class(options.schedule)(local, options.microbatches, loss_fn=_loss())

        def step() -> None:
            stage.zero_grad()
            if rank == 0:
                schedule.step(inputs, return_outputs=False)
            else:
                schedule.step(target=target, losses=[], return_outputs=False)

        yield timed("step", step)


# ---- faults -----------------------------------------------------------------------------------


def _faults(options: PipelineOptions) -> dict[str, Any]:
    found: dict[str, Any] = {name: [] for name in ("stages_s", "one_s", "gap", "step_s")}
    for _ in range(max(1, options.runs // 5)):  # each takes a minute
        back_s, gap, step_s = _killed(("--pipeline", f"--group={SIZE}"), 1)
        found["stages_s"].append(back_s)
        found["gap"].append(gap)
        found["step_s"].append(step_s)
        found["one_s"].append(_killed((), 0)[0])
    metrics = {name: median(values) for name, values in found.items()}
    return {**metrics, "beyond_one_s": metrics["stages_s"] - metrics["one_s"], "times": found}


def _killed(flags: Sequence[str], inner: int) -> tuple[float, float, float]:
    """Kill group rank `inner` of worker 0 of 2 in async.

    Returns the seconds until its next counted step, the longest pause of worker 1 meanwhile in median steps, and its
    median step.
    """
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        history = Path(folder) / "h.jsonl"
        command = [sys.executable, "-m", "paramserver.launch", "-n", "2", "--mode", "async", "--history", str(history),
                   f"--set=slowdown.base_s={_BASE_S}", "--set=output.store=false", *_TASK, *flags]  # fmt: skip
        log = (Path(folder) / "log").open("w+")
        with undisturbed():
            process = subprocess.Popen(
                command, cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            _until(process, log, lambda: min(len(_counted(history, rank)) for rank in (0, 1)) >= _COUNTED)
            killed_at = time.monotonic()
            os.kill(_member(process.pid, 0, inner), signal.SIGKILL)
            is_back = lambda: len([at for at in _counted(history, 0) if at > killed_at + _BASE_S / 2]) >= _COUNTED  # noqa: E731
            _until(process, log, is_back)
            back_at = next(at for at in _counted(history, 0) if at > killed_at + _BASE_S / 2)
            other = _counted(history, 1)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    steps = [(later - at, later) for at, later in pairwise(other)]
    step_s = median([taken for taken, at in steps if at < killed_at])
    return back_at - killed_at, max(taken for taken, at in steps if killed_at < at < back_at) / step_s, step_s


def _until(process: subprocess.Popen[bytes], log: Any, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise ParamServerError(f"ps-launch of a measurement did not get so far:\n{log.read()[-4000:]}")
        time.sleep(0.2)


def _counted(history: Path, rank: int) -> list[float]:
    """When the server counted the contributions of a rank, in monotonic seconds."""
    lines = history.read_text().splitlines() if history.exists() else []
    events = (json.loads(line) for line in lines if '"op":"accept"' in line)
    return [item["t"] for item in events if item["rank"] == rank and item["outcome"] == "accepted"]


def _member(launcher: int, rank: int, inner: int) -> int:
    """The process id of a process of a worker, below ps-launch."""
    parents, found = {launcher}, {}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda item: int(item.name)):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes().split(b"\0")
            environ = dict(item.split(b"=", 1) for item in (path / "environ").read_bytes().split(b"\0") if b"=" in item)
        except OSError:
            continue
        if parent in parents:
            parents.add(int(path.name))
            is_rank = str(rank).encode() in (environ.get(b"PS_WORKER__RANK"), *command[-2:])
            if b"paramserver.worker" in command and is_rank:
                found[int(environ.get(b"RANK", b"0")) if b"MASTER_PORT" in environ else 0] = int(path.name)
    if inner not in found:
        raise ParamServerError(f"no process {inner} of worker {rank} was found below ps-launch")
    return found[inner]


# ---- all --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _become_member(rank: int, port: int) -> None:
    stay_on("lo")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _table(options: PipelineOptions, results: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    if found := results.get("speed"):
        rows = [
            ["one process", f"{found['one_ms']:,.1f}", "", ""],
            ["two stages", f"{found['stages_ms']:,.1f}", f"{found['of_ideal']:.2f}", f"{found['beside_bare']:.2f}"],
            ["bare torch", f"{found['bare_ms']:,.1f}", f"{found['bare_of_ideal']:.2f}", "1.00"],
        ]
        parts.append(
            number_table(
                [f"{options.schedule}, {options.microbatches} microbatches", "ms", "of ideal", "beside bare"], rows
            )
        )
    if found := results.get("faults"):
        rows = [
            ["two stages", f"{found['stages_s']:.1f}", f"{found['gap']:.2f}"],
            ["one process", f"{found['one_s']:.1f}", ""],
        ]
        parts.append(number_table(["killed", "s to the next counted step", "pause of the other, in steps"], rows))
    load = f"load {results['load_before']:.1f} before, {results['load_after']:.1f} after"
    return page("Stages of a pipeline, medians", *parts, notes=[load])
