"""A race on limited links: the same model, data, batch and local optimizer, trained by every side for the same seconds.

Each worker is on a host of its own, whose link is limited both ways (rig/links.py); a server of ours is on one host
more, whose link has the same latency, and its own limit if there is one. Sides take turns; each has every learning rate
with every seed, and stands in the table with the rate whose mean final loss is lowest. What a sample is, and why
evaluation costs nothing: rig/racer.py. Bytes are those of a worker's link, both ways, the mean of all workers.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import RenderableType

from ...common.errors import ParamServerError
from ..baselines.base import choose
from ..output.machine import machine
from ..output.report import Report
from ..output.tables import number, number_table, page
from ..rig.links import Host, linked_hosts
from ..rig.racer import WEIGHTS, Race, race_task
from ..rig.server_process import clean_environment, running_server, undisturbed

_READY_S, _END_S, _TURN_S = 120.0, 30.0, 0.05
SLOW = 3.0  # what the last worker's computing takes longer, where speeds are unequal
_LN_256 = math.log(256)  # the loss of every side before its first step

Point = tuple[float, float, float]  # seconds, MB on a worker's link, held-out loss


@dataclass(frozen=True)
class Ours:
    """A mode of ours, and its codecs up and down."""

    mode: str
    codec: str = "raw"
    reply_codec: str = "raw"

    @property
    def settings(self) -> dict[str, str]:
        """Of the server and of each worker; all else is as it is by default."""
        worker = {"transports": "direct,grpc", "codec": self.codec, "reply_codec": self.reply_codec, "threads": "1"}
        run = {"run.mode": self.mode, "server.insecure": "true"}
        return {f"worker.{name}": value for name, value in worker.items()} | run


OURS = {
    "sync": Ours("sync"),
    "sync-q4": Ours("sync", "q4", "q4"),
    "ssp": Ours("ssp"),
    "localsgd": Ours("localsgd"),
    "diloco-q4": Ours("diloco", "q4", "q4"),
    "async_diloco": Ours("async_diloco"),
    "allreduce": Ours("allreduce"),
    "allreduce-q4": Ours("allreduce", "q4"),
    "auto": Ours("sync", "auto"),
}


@dataclass(frozen=True)
class RaceOptions:
    bandwidth_mbit: float
    server_mbit: float  # 0: unlimited
    latency_ms: float
    workers: int
    seconds: float
    lrs: tuple[float, ...]
    seeds: int
    unequal: bool
    target: float | None
    modes: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One side with one learning rate and seed."""

    lr: float
    steps: float  # of a worker
    curve: list[Point]
    load: float = 0.0  # load average of the machine at the end

    @property
    def loss(self) -> float:
        return self.curve[-1][2]


def measure_race(options: RaceOptions, baseline_names: Sequence[str]) -> Report:
    """Race every mode and every installed baseline."""
    peers, notes = choose(baseline_names, "race")
    sides: dict[str, Ours | str] = {peer.name: peer.name.replace("-", "_") for peer in peers}
    sides |= {name: OURS[name] for name in options.modes}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    turns = list(product(range(options.seeds), options.lrs, sides))
    rates = [options.bandwidth_mbit] * options.workers + [options.server_mbit]
    with linked_hosts(rates, options.latency_ms) as hosts:
        for number, (seed, lr, name) in enumerate(turns, 1):
            try:
                runs[name].append(_run(options, hosts, sides[name], lr, seed))
                outcome = f"held-out loss {runs[name][-1].loss:.3f}"
            except ParamServerError as error:
                outcome = f"failed: {error}"
                notes.append(f"{name}, rate {lr:g}, seed {seed}: {outcome}")
            print(f"{number}/{len(turns)} {name}, rate {lr:g}, seed {seed}: {outcome}", file=sys.stderr, flush=True)
    results = summed_up(runs, options.target, options.seeds)
    config = {**vars(options), "sides": list(sides)}
    return Report("race", config, results, _table(options, results, notes))


def summed_up(runs: dict[str, list[Run]], target: float | None, seeds: int) -> dict[str, Any]:
    """The sides, best first, each with its best learning rate; and the target: as asked, else plain DDP's best mean."""
    best = {name: chosen for name, found in runs.items() if (chosen := best_rate(found, seeds))}
    if target is None and "ddp" in best:
        target = mean(run.loss for run in best["ddp"])
    sides = {name: _of_side(found, target) for name, found in best.items()}
    ordered = dict(sorted(sides.items(), key=lambda item: float(item[1]["loss"])))
    for name, side in ordered.items():
        side["rates"] = {f"{run.lr:g}": mean(r.loss for r in runs[name] if r.lr == run.lr) for run in runs[name]}
    return ({} if target is None else {"target_loss": target}) | {"sides": ordered}


def best_rate(runs: list[Run], seeds: int) -> list[Run]:
    """The runs of the learning rate with the lowest mean loss, of those whose every seed ended with a finite one."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        by_rate.setdefault(run.lr, []).append(run)
    whole = [found for found in by_rate.values() if len(found) == seeds and all(math.isfinite(r.loss) for r in found)]
    return min(whole, key=lambda found: mean(run.loss for run in found), default=[])


def reached(curve: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Seconds and MB at which the curve first comes to the target, on the line between two samples; None if never."""
    for before, after in zip([(0.0, 0.0, _LN_256), *curve], curve, strict=False):
        if after[2] <= target:
            part = (before[2] - target) / (before[2] - after[2]) if before[2] > after[2] else 1.0
            return before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1])
    return None


def _of_side(runs: list[Run], target: float | None) -> dict[str, Any]:
    losses, curves = [run.loss for run in runs], [run.curve for run in runs]
    found: dict[str, Any] = {
        "lr": runs[0].lr, "loss": mean(losses), "loss_low": min(losses), "loss_high": max(losses),
        "steps": mean(run.steps for run in runs), "link_mb": mean(curve[-1][1] for curve in curves),
        "load_average": mean(run.load for run in runs),
        "curve": [[mean(values) for values in zip(*points, strict=True)] for points in zip(*curves, strict=True)],
    }  # fmt: skip
    if target is not None:
        hits = [hit for curve in curves if (hit := reached(curve, target))]
        found["reached_runs"] = len(hits)
        if hits:
            found |= {"target_s": mean(hit[0] for hit in hits), "target_mb": mean(hit[1] for hit in hits)}
    return found


def _run(options: RaceOptions, hosts: list[Host], side: Ours | str, lr: float, seed: int) -> Run:
    addresses = [host.address for host in hosts[:-1]]
    slow = SLOW if options.unequal else 1.0
    race = Race(side if isinstance(side, str) else None, addresses, lr, seed, options.seconds, slow)
    with tempfile.TemporaryDirectory(prefix="ps-race-") as name, ExitStack() as stack:
        folder, environment = Path(name), clean_environment()
        race.write(folder)
        if isinstance(side, Ours):
            environment |= stack.enter_context(_server(options, hosts[-1], side))
        workers = stack.enter_context(_workers(hosts[:-1], folder, environment))
        _wait(folder, "ready", workers, _READY_S)
        (folder / "start.new").write_text(str(time.monotonic() + 0.5))
        (folder / "start.new").rename(folder / "start")
        _wait(folder, "done", workers, options.seconds + _END_S)
        load = os.getloadavg()[0]
        seen = [json.loads((folder / f"done{rank}").read_text()) for rank in range(options.workers)]
        return Run(lr, mean(samples[-1][1] for samples in seen), _curve(seen, folder), load)


@contextmanager
def _server(options: RaceOptions, host: Host, side: Ours) -> Iterator[dict[str, str]]:
    """A server for this side; the environment of its workers."""
    settings = {**side.settings, "run.workers": str(options.workers)}
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    with running_server(*flags, prefix=host.prefix, listen=f"{host.address}:0") as server:
        names = {"PS_" + name.upper().replace(".", "__"): value for name, value in side.settings.items()}
        yield {**names, "PS_WORKER__SERVER": server.address, "PS_LOG__LEVEL": "warning"}


@contextmanager
def _workers(hosts: list[Host], folder: Path, environment: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = []
    try:
        for rank, host in enumerate(hosts):
            command = [*host.prefix, sys.executable, "-m", "paramserver.benchmarks.rig.racer", str(folder), str(rank)]
            with (folder / f"log{rank}").open("wb") as log:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                with undisturbed():
                    started.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))
        yield started
    finally:
        with undisturbed():
            for worker in started:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)  # what it started too
                worker.wait()


def _wait(folder: Path, state: str, workers: list[subprocess.Popen[bytes]], most_s: float) -> None:
    """Until every worker has posted `state`. ParamServerError, with its last words, when one cannot any more."""
    deadline = time.monotonic() + most_s
    missing = set(range(len(workers)))
    while missing:
        ended = {rank for rank in missing if workers[rank].poll() is not None}
        missing -= {rank for rank in missing if (folder / f"{state}{rank}").exists()}
        if missing and (failed := sorted(missing & ended)):
            lines = (folder / f"log{failed[0]}").read_text(errors="replace").strip().splitlines()
            raise ParamServerError(f"worker {failed[0]} ended early: {' '.join(map(str.strip, lines[-2:]))[-300:]}")
        if missing and time.monotonic() > deadline:
            raise ParamServerError(f"worker {min(missing)} was not {state} after {most_s:g} s")
        time.sleep(_TURN_S)


def _curve(seen: list[list[list[float]]], folder: Path) -> list[Point]:
    """The samples of a run whose workers have ended: evaluates the weights that rank 0 kept."""
    import torch
    from safetensors.torch import load_file
    from torch.nn.utils import vector_to_parameters

    torch.set_num_threads(int(machine()["cores"]))
    task = race_task()
    model, points = task.model(), []
    weights = load_file(folder / WEIGHTS)
    for index in range(len(weights)):
        vector_to_parameters(weights[str(index)], model.parameters())
        link_mb = mean(samples[index][2] for samples in seen) / 1e6
        points.append((seen[0][index][0], link_mb, float(task.evaluate(model)["loss"])))
    return points


def _table(options: RaceOptions, results: dict[str, Any], notes: list[str]) -> RenderableType:
    target = results.get("target_loss")
    aim = "the target" if target is None else f"{target:.3f}"
    columns = [
        "held-out loss, nats a byte",
        "mean",
        "range",
        "steps",
        "MB on a link",
        f"s to {aim}",
        "MB to it",
        "rate",
        "load",
    ]
    rows = [
        [
            name + ("" if name in OURS else " *"),
            f"{side['loss']:.3f}",
            f"{side['loss_low']:.3f} to {side['loss_high']:.3f}",
            f"{side['steps']:,.0f}",
            f"{side['link_mb']:,.0f}",
            _hit(side, "target_s", options.seeds),
            number(side.get("target_mb"), "{:,.0f}"),
            f"{side['lr']:g}",
            f"{side['load_average']:.1f}",
        ]
        for name, side in results["sides"].items()
    ]
    speed = f"the last {SLOW:g} times slower" if options.unequal else "of equal speed"
    server = f"{options.server_mbit:g} Mbit/s" if options.server_mbit else "unlimited"
    title = (
        f"{options.workers} workers, {speed}, each on a link of {options.bandwidth_mbit:g} Mbit/s, "
        f"{options.latency_ms:g} ms; {options.seconds:g} s each, seeds: {options.seeds}, "
        f"rates {', '.join(f'{lr:g}' for lr in options.lrs)}"
    )
    about = [f"* baselines; the server's link: {server}; load: the machine's, on average at the ends of a side's runs"]
    if target is None:
        about.append("no target: plain ddp did not run, and --target names none")
    return page(title, number_table(columns, rows), notes=[*about, *notes])


def _hit(side: dict[str, Any], key: str, seeds: int) -> str:
    if key not in side:
        return "not reached" if "reached_runs" in side else ""
    return f"{side[key]:,.1f}" + (f" ({side['reached_runs']} of {seeds})" if side["reached_runs"] < seeds else "")
