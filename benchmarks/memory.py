"""How much memory the server takes at its peak, beside the sum of what it has to hold.

The peak is the kernel's (VmHWM) less what the same process held before a model came. The sum is
the parameters, twice that for the state of Adam, the mean of a round, one encoded reply, and the
uploads that `server.max_staged` allows at once (of which there are never more than workers). The
mean of a round is an upload that has left the staging pool, so the sum counts it beside them.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..common.config import ServerConfig
from ..common.errors import ParamServerError
from .machine import memory_of
from .results import Report
from .server_process import running_server
from .worker_run import take_steps

_NUM_STEPS = 6
_WORKERS_END_S = 600.0


@dataclass(frozen=True)
class MemoryOptions:
    mb: int
    workers: int

    @property
    def num_floats(self) -> int:
        return self.mb * 1_000_000 // 4


def measure_memory(options: MemoryOptions) -> Report:
    """One run in sync mode with Adam, every worker a process."""
    max_staged = ServerConfig().max_staged
    flags = ("--mode", "sync", "--workers", str(options.workers), "--steps", str(_NUM_STEPS + 1))
    with running_server(*flags, "--set", f"server.max_staged={max_staged}") as server:
        address = server.address
        before = memory_of(server.pid)["rss"]
        _train(options, address)
        peak = memory_of(server.pid)["peak"]
    body = options.num_floats * 4
    parts = {
        "parameters": body,
        "optimizer_state": 2 * body,
        "mean": body,
        "staged": min(max_staged, options.workers) * body,
        "reply": body,
    }
    expected = sum(parts.values())
    results: dict[str, Any] = {
        "before_mb": before / 1e6,
        "peak_mb": peak / 1e6,
        "model_mb": (peak - before) / 1e6,
        "expected_mb": expected / 1e6,
        "ratio": (peak - before) / expected,
        "expected_parts_mb": {name: num_bytes / 1e6 for name, num_bytes in parts.items()},
    }
    config = {**vars(options), "mode": "sync", "optimizer": "adam", "steps": _NUM_STEPS, "max_staged": max_staged}
    return Report("memory", config, results, _table(options, results, parts))


def _train(options: MemoryOptions, address: str) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=take_steps, args=(address, rank, options.num_floats, "adam", _NUM_STEPS), daemon=True)
        for rank in range(options.workers)
    ]
    try:
        for worker in workers:
            worker.start()
        for rank, worker in enumerate(workers):
            worker.join(_WORKERS_END_S)
            if worker.exitcode != 0:
                raise ParamServerError(f"the worker of rank {rank} ended with {worker.exitcode}")
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


def _table(options: MemoryOptions, results: dict[str, Any], parts: dict[str, int]) -> Group:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, num_bytes in parts.items():
        table.add_row(name.replace("_", " "), f"{num_bytes / 1e6:,.0f} MB")
    table.add_row("sum", f"{results['expected_mb']:,.0f} MB")
    table.add_row("server's peak", f"{results['model_mb']:,.0f} MB", style="bold")
    table.add_row("peak / sum", f"{results['ratio']:.2f}")
    title = f"{options.mb:,} MB float32, sync, adam, {options.workers} workers"
    note = f"before any model came the server held {results['before_mb']:,.0f} MB, which are not counted"
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))
