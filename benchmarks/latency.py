"""How long a small exchange takes, beside a bare gRPC ping-pong of the same size.

Both are open streams between two processes, measured in turns of a tenth of the exchanges each, so
that a noisy machine disturbs both. The exchange includes everything behind `optimizer.step()`: the
gathering of gradients, both messages, the check for NaN, the fold and the server's optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .echo import echo_stream
from .results import Report, median, percentile
from .server_process import running_server
from .worker_run import joined_worker

_NUM_TURNS = 10


@dataclass(frozen=True)
class LatencyOptions:
    floats: int
    exchanges: int
    mode: str
    optimizer: str

    @property
    def num_warmup(self) -> int:
        return max(1, self.exchanges // _NUM_TURNS)


def measure_latency(options: LatencyOptions) -> Report:
    """Exchanges and pings in turns."""
    num_steps = options.num_warmup + options.exchanges + 1
    flags = ("--mode", options.mode, "--workers", "1", "--steps", str(num_steps), "--local-steps", "1")
    with (
        running_server(*flags) as server,
        echo_stream() as stream,
        joined_worker(server.address, 0, options.floats, options.optimizer) as worker,
    ):
        payload = bytes(worker.sent_bytes)
        step, ping = worker.optimizer.step, lambda: stream.ping(payload)
        _times_us(step, options.num_warmup)
        _times_us(ping, options.num_warmup)
        exchanges: list[float] = []
        pings: list[float] = []
        for turn in range(_NUM_TURNS):
            count = options.exchanges * (turn + 1) // _NUM_TURNS - len(exchanges)
            exchanges += _times_us(step, count)
            pings += _times_us(ping, count)
    results = {"exchange": _figures(exchanges), "ping": _figures(pings)}
    results["ratio"] = {name: results["exchange"][name] / results["ping"][name] for name in results["ping"]}
    config = {**vars(options), "payload_bytes": len(payload), "warmup": options.num_warmup}
    return Report("latency", config, results, _table(options, results))


def _times_us(call: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def _figures(times_us: list[float]) -> dict[str, float]:
    return {
        "median_us": median(times_us),
        "p90_us": percentile(times_us, 0.90),
        "p99_us": percentile(times_us, 0.99),
        "best_us": min(times_us),
    }


def _table(options: LatencyOptions, results: dict[str, dict[str, float]]) -> Group:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("median", "p90", "p99", "best"):
        table.add_column(name, justify="right")
    for name, row in (("exchange, optimizer step included", "exchange"), ("bare gRPC ping-pong", "ping")):
        table.add_row(name, *(f"{value:,.0f} us" for value in results[row].values()))
    table.add_row("ratio", *(f"{value:.2f}" for value in results["ratio"].values()))
    title = f"{options.floats:,} floats, {options.mode}, {options.optimizer}; {options.exchanges:,} exchanges"
    return Group(Text(title, style="bold"), table)
