"""An exchange of several workers with a server of one and of several shards: the time of a step, and what each holds.

Every process is of its own on this machine. A step is one `optimizer.step()` of every worker after a barrier; it has
taken what its slowest worker took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ..output.report import Report, median
from ..output.tables import number_table, page
from ..rig.ours import Variant
from ..rig.server_process import ServerProcess, running_server
from ..rig.team import slowest, team
from .rounds import RoundOptions, worker_life

_NUM_WARMUP = 2
_STATE_S = 30.0


@dataclass(frozen=True)
class ShardOptions:
    mb: int
    shards: tuple[int, ...]
    workers: tuple[int, ...]
    modes: tuple[str, ...]
    optimizer: str
    runs: int
    transport: str


def measure_shards(options: ShardOptions) -> Report:
    """Measure every mode with every number of shards and workers."""
    rows: list[dict[str, Any]] = []
    for mode in options.modes:
        for workers in options.workers:
            for shards in options.shards:
                rows.append(
                    {"mode": mode, "workers": workers, "shards": shards, **_measured(options, mode, workers, shards)}
                )
    return Report("shards", vars(options), {"rows": rows}, _table(options, rows))


def _measured(options: ShardOptions, mode: str, workers: int, shards: int) -> dict[str, Any]:
    round_ = RoundOptions(options.mb, workers, options.runs, mode, options.optimizer, options.transport)
    variant = Variant(options.transport, options.transport, renews=False)
    steps = str(_NUM_WARMUP + options.runs + 1)
    flags = ("--mode", mode, "--workers", str(workers), "--steps", steps, "--optimizer", options.optimizer)
    with (
        sharded_server(shards, *flags) as server,
        team(workers, worker_life, server.address, round_, variant) as members,
    ):
        slowest(members.turns(_NUM_WARMUP))
        times = slowest(members.turns(options.runs))["round"]
        num_bytes = _weight_bytes(server, shards)
    moved_gb = 2 * workers * options.mb / 1e3
    return {
        "step_ms": median(times) * 1e3,
        "best_ms": min(times) * 1e3,
        "gb_s": moved_gb / median(times),
        "held_mb": [number / 1e6 for number in num_bytes],
    }


@contextmanager
def sharded_server(shards: int, *flags: str) -> Iterator[ServerProcess]:
    """Run a coordinator with its other shards."""
    with ExitStack() as stack:
        first = stack.enter_context(running_server("--shards", str(shards), *flags))
        for number in range(1, shards):
            where = ("--shard", str(number), "--shards", str(shards), "--coordinator", first.address)
            stack.enter_context(running_server(*where))
        yield first


def _weight_bytes(server: ServerProcess, shards: int) -> list[int]:
    """By shard: weights, mean and optimizer state, as the newest status event with all of them says."""
    if shards == 1:
        return []
    server.wait_for("status", _STATE_S)
    statuses = [event for event in server.events if event.get("event") == "status"]
    full = [event["shard_bytes"] for event in statuses if len(event.get("shard_bytes", [])) == shards]
    return list(full[-1]) if full else []


def _table(options: ShardOptions, rows: Sequence[dict[str, Any]]) -> Any:
    lines = []
    for row in rows:
        num_bytes = ", ".join(f"{item:,.0f}" for item in row["held_mb"])
        shown = [f"{row['step_ms']:,.0f} ms", f"{row['best_ms']:,.0f} ms", f"{row['gb_s']:.2f}", num_bytes]
        lines.append([f"{row['mode']}, {row['workers']} workers, {row['shards']} shards", *shown])
    title = (
        f"{options.mb:,} MB float32, transport {options.transport}, {options.optimizer}; {options.runs} runs, "
        "the slowest worker of each"
    )
    return page(title, number_table(["", "median", "best", "GB/s in all", "held, MB"], lines, bold=()), notes=[])
