"""A race on limited links: the same model, data, batch and local optimizer, trained by every side for the same seconds.

Each worker is on a host of its own, whose link is limited both ways (rig/links.py). A server of ours is on the workers'
hosts, a shard on each, or on one host more with a link of its own (--server-bandwidth). Every side first has each
learning rate with one seed, then the best of them with the other seeds. Sides take turns. What a sample is, and why
evaluation costs nothing: rig/racer.py. Bytes are those of a worker's link, both ways, the mean of all workers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import RenderableType

from ...common.errors import OutputError, ParamServerError, UsageError
from ..baselines.base import choose
from ..output.report import Report
from ..output.tables import number, number_table, page
from ..rig.forks import forking
from ..rig.links import Host, linked_hosts
from ..rig.race_run import Ours, Point, Run, race_once
from ..rig.racer import Race

SLOW = 3.0  # what the last worker's computing takes longer, where speeds are unequal
_LN_256 = math.log(256)  # the loss of every side before its first step
_BESIDE_S = 4.0  # of a run, to start, stop and evaluate: an estimate

OURS = {
    "sync": Ours("sync"),
    "sync-q4": Ours("sync", "q4", "q4"),
    "ssp": Ours("ssp"),
    "localsgd": Ours("localsgd"),
    "diloco-q4": Ours("diloco", "q4", "q4"),
    "async_diloco": Ours("async_diloco"),
    "allreduce": Ours("allreduce", has_peers=True),
    "allreduce-q4": Ours("allreduce", "q4", has_peers=True),
}
# With --regions: sync within each, which exchanges with the run above.
OF_REGIONS = {
    "regions-sync": Ours("sync", above="sync"),
    "regions-sync-q4": Ours("sync", "q4", "q4", above="sync"),
    "regions-diloco-q4": Ours("sync", "q4", "q4", above="diloco", every=32),
    "regions-async_diloco-q4": Ours("sync", "q4", "q4", above="async_diloco", every=32),
}
FLAT_BESIDE_REGIONS = ("sync", "async_diloco", "async_diloco-q4")
OURS |= OF_REGIONS | {"async_diloco-q4": Ours("async_diloco", "q4", "q4")}


@dataclass(frozen=True)
class RaceOptions:
    bandwidth_mbit: float
    server_mbit: float | None  # of a host of its own; None: the workers' hosts
    latency_ms: float
    workers: int
    seconds: float
    lrs: tuple[float, ...]
    seeds: int
    unequal: bool
    target: float | None
    modes: tuple[str, ...]
    shards: int = 1  # of a server on the workers' hosts
    resume: str | None = None
    regions: int = 0  # hosts that the workers share; 0: a host for each


_SAME = ("bandwidth_mbit", "server_mbit", "latency_ms", "workers", "seconds", "unequal", "shards", "regions")


@dataclass
class Record:
    """The finished runs of a race, by side, and a line for each that failed. With a `path` every run is kept there, and
    a race that was interrupted goes on where it was."""

    options: RaceOptions
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failed: dict[tuple[str, float, int], str] = field(default_factory=dict)

    def load(self) -> None:
        """Read the file, if there is one. UsageError for one of another race."""
        path = Path(self.options.resume or "")
        if self.options.resume is None or not path.exists():
            self._write({key: getattr(self.options, key) for key in _SAME})
            return
        try:
            before, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            differing = [key for key in _SAME if before[key] != getattr(self.options, key)]
            for line in lines:
                self._add(line.pop("side"), line)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            fix = "name a file that does not exist: it will be made"
            raise UsageError(f"--resume {path}: not a file of ps-bench race", fix=fix) from None
        if differing:
            key = differing[0]
            message = f"--resume {path}: a race with {key} {before[key]}, and this one has {getattr(self.options, key)}"
            raise UsageError(message, fix="give the same flags, or another file")

    def has(self, side: str, lr: float, seed: int) -> bool:
        is_done = any(run.lr == lr and run.seed == seed for run in self.runs.get(side, ()))
        return is_done or (side, lr, seed) in self.failed

    def note(self, side: str, result: Run | str, lr: float, seed: int) -> None:
        line = asdict(result) if isinstance(result, Run) else {"failed": result, "lr": lr, "seed": seed}
        self._add(side, dict(line))
        self._write({"side": side, **line})

    def _add(self, side: str, line: dict[str, Any]) -> None:
        if "failed" in line:
            self.failed[side, line["lr"], line["seed"]] = line["failed"]
            return
        curve = [(float(point[0]), float(point[1]), float(point[2])) for point in line.pop("curve")]
        self.runs.setdefault(side, []).append(Run(curve=curve, **line))

    def _write(self, line: dict[str, Any]) -> None:
        if self.options.resume is None:
            return
        try:
            with Path(self.options.resume).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            message = f"cannot write {self.options.resume}: {error.strerror}"
            raise OutputError(message, fix="choose a path you may write to") from None


def measure_race(options: RaceOptions, baseline_names: Sequence[str]) -> Report:
    """Race every mode and every installed baseline."""
    peers, notes = choose(baseline_names, "race")
    sides: dict[str, Ours | str] = {peer.name: peer.name.replace("-", "_") for peer in peers}
    sides |= {name: OURS[name] for name in options.modes}
    record = Record(options)
    record.load()
    own_host = [] if options.server_mbit is None else [options.server_mbit]
    with ExitStack() as stack:
        stack.enter_context(forking())
        rates = [options.bandwidth_mbit] * (options.regions or options.workers) + own_host
        hosts = stack.enter_context(linked_hosts(rates, options.latency_ms))
        _announce(options, len(sides))
        for number, (name, lr, seed) in enumerate(_turns(options, list(sides), record), 1):
            result = _outcome(options, hosts, sides[name], (lr, seed), number)
            record.note(name, result, lr, seed)
            outcome = result if isinstance(result, str) else f"held-out loss {result.loss:.3f}"
            print(f"{number} {name}, rate {lr:g}, seed {seed}: {outcome}", file=sys.stderr, flush=True)
    notes += [f"{side}, rate {lr:g}, seed {seed}: {why}" for (side, lr, seed), why in record.failed.items()]
    runs = {name: record.runs.get(name, []) for name in sides}
    results = summed_up(runs, options.target, options.seeds)
    config = {**vars(options), "sides": list(sides)}
    return Report("race", config, results, _table(options, results, notes))


def _announce(options: RaceOptions, num_sides: int) -> None:
    num_runs = num_sides * (len(options.lrs) + options.seeds - 1)
    minutes = num_runs * (options.seconds + _BESIDE_S) / 60
    print(f"{num_sides} sides, at most {num_runs} runs: about {minutes:.0f} minutes", file=sys.stderr, flush=True)


def _turns(options: RaceOptions, sides: list[str], record: Record) -> Iterator[tuple[str, float, int]]:
    """The runs that are missing: every rate with seed 0, then the best rate with the other seeds."""
    for lr, name in product(options.lrs, sides):
        if not record.has(name, lr, 0):
            yield name, lr, 0
    for seed, name in product(range(1, options.seeds), sides):
        first = [run for run in record.runs.get(name, []) if run.seed == 0 and run.lr in options.lrs]
        if (best := best_rate(first, 1)) and not record.has(name, best[0].lr, seed):
            yield name, best[0].lr, seed


def _outcome(
    options: RaceOptions, hosts: Sequence[Host], side: Ours | str, chosen: tuple[float, int], number: int
) -> Run | str:
    """The run, or why there is none."""
    slow, regions, has_relays = SLOW if options.unequal else 1.0, options.regions, bool(getattr(side, "above", ""))
    ranks = range(options.workers)
    addresses = [hosts[rank * regions // options.workers if regions else rank].address for rank in ranks]
    peer = side if isinstance(side, str) else None
    race = Race(peer, addresses, *chosen, options.seconds, slow, regions, has_relays)
    try:
        return race_once(race, side if isinstance(side, Ours) else None, hosts, options.shards, number)
    except ParamServerError as error:
        return f"failed: {error}"


def summed_up(runs: dict[str, list[Run]], target: float | None, seeds: int) -> dict[str, Any]:
    """The sides, best first, each with its best learning rate; and the target: as asked, else plain DDP's best mean."""
    best = {name: chosen for name, found in runs.items() if (chosen := best_rate(found, seeds))}
    reference = next((name for name in ("ddp", "sync") if name in best), "")
    if target is None and reference:
        target = mean(run.loss for run in best[reference])
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
        "load_average": mean(run.load for run in runs), "start_s": mean(run.start_s for run in runs),
        "curve": [[mean(values) for values in zip(*points, strict=True)] for points in zip(*curves, strict=True)],
    }  # fmt: skip
    if target is not None:
        hits = [hit for curve in curves if (hit := reached(curve, target))]
        found["reached_runs"] = len(hits)
        if hits:
            found |= {"target_s": mean(hit[0] for hit in hits), "target_mb": mean(hit[1] for hit in hits)}
    return found


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
    home = f"a server of ours has a shard on {'each' if options.shards > 1 else 'the first'} worker's host"
    if options.server_mbit is not None:
        home = f"the server's own link: {f'{options.server_mbit:g} Mbit/s' if options.server_mbit else 'unlimited'}"
    title = (
        f"{options.workers} workers, {speed}, each on a link of {options.bandwidth_mbit:g} Mbit/s, "
        f"{options.latency_ms:g} ms; {options.seconds:g} s each; every side tried rates "
        f"{', '.join(f'{lr:g}' for lr in options.lrs)} with one seed, and the best of them with {options.seeds} in all"
    )
    about = [f"* baselines; {home}; load: the machine's, on average at the ends of a side's runs"]
    if target is None:
        about.append("no target: plain ddp did not run, and --target names none")
    return page(title, number_table(columns, rows), notes=[*about, *notes])


def _hit(side: dict[str, Any], key: str, seeds: int) -> str:
    if key not in side:
        return "not reached" if "reached_runs" in side else ""
    return f"{side[key]:,.1f}" + (f" ({side['reached_runs']} of {seeds})" if side["reached_runs"] < seeds else "")
