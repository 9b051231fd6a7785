"""All-reduce among workers: what it carries by size, and what it costs a training step.

    algorithm bandwidth = M / t            bus bandwidth = algorithm bandwidth * 2 (N - 1) / N

as nccl-tests define them (doc/PERFORMANCE.md there): M bytes are reduced in t by N workers; the second is what a link
of a ring carries, whatever N is. The formula beside them is 2 M (N - 1) / N bytes at the speed of one plain TCP stream
(`rig/bandwidth.py`), as if all links were as fast at once. Over loopback they share the cores, so the formula is a
bound and no forecast.

A training step is measured once more with nobody to average with: what a step takes beyond that is communication that
its backward did not hide.
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
from ..rig.bandwidth import stream_bytes_per_s
from ..rig.reducing import PARTS, StepSize, alone_life, group_life, joined_life
from ..rig.server_process import running_server
from ..rig.team import measured_team, slowest, team
from ..rig.turns import Contestant, Measured, Samples, measure
from ..rig.worker_run import set_transport

_NUM_WARMUP = 3
OURS, SERVER, ALONE = "ours", "sync, by the server", "computing alone"
_STARTED = "processes of all, DDP's too, are started by ps-bench and meet at a file, as under torchrun at its store"


@dataclass(frozen=True)
class AllreduceOptions:
    mb: int
    workers: int
    runs: int
    step: StepSize
    sweep: bool = False
    min_kb: int = 1
    max_mb: int = 100

    @property
    def sizes(self) -> list[int]:
        """Returns sizes in bytes; in a sweep each is ten times the last."""
        if not self.sweep:
            return [self.mb * 1_000_000]
        most, sizes = self.max_mb * 1_000_000, [self.min_kb * 1000]
        while sizes[-1] * 10 <= most:
            sizes.append(sizes[-1] * 10)
        return sizes


def measure_allreduce(options: AllreduceOptions, baseline_names: Sequence[str]) -> Report:
    """Measure the sizes, then the step, of ours and of installed baselines."""
    bytes_per_s = stream_bytes_per_s()
    with chosen_running(baseline_names, "allreduce") as (baselines, lines):
        reduced: dict[str, Callable[[], Contestant]] = {
            OURS: partial(measured_team, options.workers, group_life, options.sizes)
        }
        reduced |= {
            baseline.name: partial(baseline.allreduce, options.sizes, options.workers) for baseline in baselines
        }
        by_size = measure(reduced, num_turns=options.runs, warmup=_NUM_WARMUP)
    with chosen_running(baseline_names, "profile") as (baselines, more):
        stepped: dict[str, Callable[[], Contestant]] = {
            ALONE: partial(_alone, options),
            OURS: partial(_our_step, options, "allreduce"),
            SERVER: partial(_our_step, options, "sync"),
        }
        stepped |= {baseline.name: partial(baseline.profile, options.step, options.workers) for baseline in baselines}
        parts = measure(stepped, num_turns=options.runs, warmup=_NUM_WARMUP)
    results = {
        "started": _STARTED,
        "stream_gb_s": bytes_per_s / 1e9,
        "sizes": [_of_size(size, options.workers, bytes_per_s, by_size) for size in options.sizes],
        "step_parameters": _num_parameters(options.step),
        "step": _of_step(parts),
    }
    config = {**vars(options), "step": vars(options.step), "warmup": _NUM_WARMUP, "baselines": list(baseline_names)}
    return Report("allreduce", config, results, _tables(options, results, [*lines, *more]))


@contextmanager
def _alone(options: AllreduceOptions) -> Iterator[Measured]:
    with team(options.workers, alone_life, options.step) as members:
        yield lambda count: slowest(members.turns(count))


@contextmanager
def _our_step(options: AllreduceOptions, mode: str) -> Iterator[Measured]:
    """Measure our step; the transport treats workers as on other hosts."""
    set_transport("direct")
    steps = str(_NUM_WARMUP + options.runs + 1)
    with (
        running_server("--mode", mode, "--workers", str(options.workers), "--steps", steps) as server,
        team(options.workers, joined_life, server.address, options.step) as members,
    ):
        yield lambda count: slowest(members.turns(count))


def bus_share(num_workers: int) -> float:
    """Returns the share of the bytes that passes each link of a ring in each direction."""
    return 2 * (num_workers - 1) / num_workers


def _num_parameters(size: StepSize) -> int:
    return 12 * size.width**2 * size.layers + 512 * size.width


def _of_size(size: int, workers: int, bytes_per_s: float, found: dict[str, Samples]) -> dict[str, Any]:
    times = {name: median(samples[str(size)]) for name, samples in found.items()}
    of = {
        name: {
            "ms": time_s * 1e3,
            "best_ms": min(found[name][str(size)]) * 1e3,
            "algorithm_gb_s": size / time_s / 1e9,
            "bus_gb_s": size / time_s / 1e9 * bus_share(workers),
        }
        for name, time_s in times.items()
    }
    ratios = {name: times[OURS] / time_s for name, time_s in times.items() if name != OURS}
    return {"size_kb": size / 1e3, "ring_ms": size * bus_share(workers) / bytes_per_s * 1e3, "of": of, "ratios": ratios}


def _of_step(found: dict[str, Samples]) -> dict[str, dict[str, float]]:
    """Medians in ms, of the slowest worker of each step; what is beyond computing alone, and its share of the step."""
    alone = median(found[ALONE]["whole"])
    ours = median(found[OURS]["whole"])
    metrics = {}
    for name, samples in found.items():
        whole = median(samples["whole"])
        metrics[name] = {f"{part}_ms": median(samples[part]) * 1e3 for part in (*PARTS, "whole")} | {
            "best_ms": min(samples["whole"]) * 1e3,
            "beyond_ms": (whole - alone) * 1e3,
            "share": 1 - alone / whole,
            "ours_of_it": ours / whole,
        }
    return metrics


def _tables(options: AllreduceOptions, results: dict[str, Any], lines: list[str]) -> RenderableType:
    names = list(results["sizes"][0]["of"])
    columns = ["all-reduce", *(f"{name} ms" for name in names), "ring ms"]
    columns += [f"{name} alg, bus GB/s" for name in names] + [f"ours / {name}" for name in names if name != OURS]
    rows = [
        [
            f"{size['size_kb']:,g} KB",
            *(f"{size['of'][name]['ms']:,.3f}" for name in names),
            f"{size['ring_ms']:,.3f}",
            *(f"{size['of'][name]['algorithm_gb_s']:.3f}, {size['of'][name]['bus_gb_s']:.3f}" for name in names),
            *(f"{ratio:.2f}" for ratio in size["ratios"].values()),
        ]
        for size in results["sizes"]
    ]
    step = results["step"]
    step_rows = [
        [
            name,
            *(f"{item[f'{part}_ms']:,.1f}" for part in (*PARTS, "whole")),
            f"{item['beyond_ms']:,.1f}",
            f"{item['share']:.0%}",
            f"{item['ours_of_it']:.2f}",
        ]
        for name, item in step.items()
    ]
    step_title = f"step of {_num_parameters(options.step) / 1e6:,.1f} M parameters, ms"
    title = (
        f"{options.workers} workers, float32 over loopback; {options.runs} runs, medians of the slowest worker; "
        f"a TCP stream carries {results['stream_gb_s']:.2f} GB/s"
    )
    columns_of_step = [step_title, *PARTS, "whole", "beyond alone", "of the step", "ours / it"]
    return page(
        title,
        number_table(columns, rows),
        "",
        number_table(columns_of_step, step_rows, bold=[1]),
        notes=[_STARTED, *lines],
    )
