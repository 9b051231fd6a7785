"""Measures a synchronous round: all workers contribute, the server steps, all get the new weights.

Every worker is a process. All wait at a barrier, then each times one `optimizer.step()`; a round has
taken what its slowest worker took. Baselines do the same without a server: all-reduce and each worker's
own optimizer (baselines/gloo.py), DistributedDataParallel (baselines/ddp.py). Contestants take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from ..baselines.run import chosen_running
from ..output.report import Report, median
from ..output.tables import number_table, page
from ..rig.ours import Variant, variants_of
from ..rig.server_process import running_server
from ..rig.team import slowest, team
from ..rig.turns import Contestant, Measured, Samples, measure, timed
from ..rig.worker_run import joined_worker

_NUM_WARMUP = 3


@dataclass(frozen=True)
class RoundOptions:
    mb: int
    workers: int
    runs: int
    mode: str
    optimizer: str
    transport: str

    @property
    def num_floats(self) -> int:
        return self.mb * 1_000_000 // 4


def measure_round(options: RoundOptions, baseline_names: Sequence[str] = ()) -> Report:
    """Measure ours over each transport, and installed baselines."""
    variants = variants_of(options.transport)
    with chosen_running(baseline_names, "round") as (baselines, lines):
        contestants: dict[str, Callable[[], Contestant]] = {
            variant.name: partial(_our_round, options, variant) for variant in variants
        }
        contestants |= {
            baseline.name: partial(baseline.round, options.num_floats, options.workers) for baseline in baselines
        }
        found = measure(contestants, num_turns=options.runs, warmup=_NUM_WARMUP)
    ours = {variant.name: _metrics(found[variant.name], options) for variant in variants}
    theirs = {baseline.name: _metrics(found[baseline.name], options) for baseline in baselines}
    results = {
        "ours": ours,
        "baselines": theirs,
        "ratios": {
            name: {baseline: theirs[baseline]["round_ms"] / metric["round_ms"] for baseline in theirs}
            for name, metric in ours.items()
        },
    }
    config = {**vars(options), "warmup": _NUM_WARMUP, "baselines": list(theirs)}
    return Report("round", config, results, _table(options, results, lines))


@contextmanager
def _our_round(options: RoundOptions, variant: Variant) -> Iterator[Measured]:
    """A server and its workers."""
    steps = str(_NUM_WARMUP + options.runs + 1)
    flags = (
        "--mode",
        options.mode,
        "--workers",
        str(options.workers),
        "--steps",
        steps,
        "--set",
        "policy.local_steps=1",
    )
    with (
        running_server(*flags) as server,
        team(options.workers, worker_life, server.address, options, variant) as workers,
    ):
        yield lambda count: slowest(workers.turns(count))


@contextmanager
def worker_life(rank: int, address: str, options: RoundOptions, variant: Variant) -> Iterator[Measured]:
    """One worker: part round is its step, with new gradients where the variant has them."""
    size = (options.num_floats, options.optimizer, "raw", variant.transport)
    with joined_worker(address, rank, *size) as worker:

        def step() -> None:
            if variant.renews:
                worker.renew_gradients()
            worker.optimizer.step()

        yield timed("round", step)


def _metrics(samples: Samples, options: RoundOptions) -> dict[str, float]:
    """Of the slowest worker of every round; the rate counts what all workers send and receive."""
    times = samples["round"]
    moved_gb = 2 * options.workers * options.num_floats * 4 / 1e9
    return {"round_ms": median(times) * 1e3, "round_best_ms": min(times) * 1e3, "gb_s": moved_gb / median(times)}


def _table(options: RoundOptions, results: dict[str, Any], lines: list[str]) -> RenderableType:
    baselines = list(results["baselines"])
    rows = []
    for name, item in (results["ours"] | results["baselines"]).items():
        ratios = results["ratios"].get(name, {})
        shown = [f"{item['round_ms']:,.1f} ms", f"{item['round_best_ms']:,.1f} ms"]
        rows.append(
            [name, *shown, *(f"{ratios[baseline]:.2f}" if baseline in ratios else "" for baseline in baselines)]
        )
    columns = ["", "median", "best", *(f"rate / {baseline}" for baseline in baselines)]
    title = (
        f"A round of {options.workers} workers, {options.mb:,} MB float32, {options.mode}, {options.optimizer}; "
        f"{options.runs} runs, the slowest worker of each"
    )
    return page(title, number_table(columns, rows, bold=range(len(results["ours"]))), notes=lines)
