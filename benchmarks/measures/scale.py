"""Measures the small exchanges per second of a server with many workers.

Real processes would measure themselves (a torch process a worker, on a few cores), so few processes
play the workers (swarm.py). What they need themselves is shown beside the server's share: where both
together use up the cores, the metric is the machine's, and the server could do more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from ..output.machine import machine
from ..output.report import Report
from ..output.tables import number_table, page
from ..rig.ours import transports_of
from ..rig.server_process import running_server
from ..rig.team import team

_STEPS = 1_000_000_000


@dataclass(frozen=True)
class ScaleOptions:
    workers: list[int]
    floats: int
    seconds: float
    generators: int
    mode: str
    optimizer: str
    transport: str


def measure_scale(options: ScaleOptions) -> Report:
    """Measure a server for each number of workers."""
    transports = [transport for transport in transports_of(options.transport) if transport != "shared"] or [
        "direct"
    ]  # a small payload is never shared
    results = {
        transport: {str(workers): _measure(options, workers, transport) for workers in options.workers}
        for transport in transports
    }
    return Report("scale", vars(options), {"transports": results}, _table(options, results))


def _measure(options: ScaleOptions, num_workers: int, transport: str) -> dict[str, float]:
    """Returns exchanges/s of all workers, and shares of one core."""
    from ..rig.swarm import SwarmOptions, swarm_life

    num_processes = min(options.generators, num_workers)
    flags = (
        "--mode",
        options.mode,
        "--workers",
        str(num_workers),
        "--steps",
        str(_STEPS),
        "--set",
        "policy.local_steps=1",
    )
    with running_server(*flags) as server:
        swarm = SwarmOptions(server.address, server.pid, options.floats, options.optimizer, options.seconds, transport)
        with team(num_processes, swarm_life, num_processes, num_workers, swarm) as generators:
            found = generators.turns(1)
    rate = sum(samples["rate"][0] for samples in found)
    server_share = sum(samples["server"][0] for samples in found) / num_processes
    return {
        "exchanges_per_s": rate,
        "per_worker_ms": num_workers / rate * 1e3,
        "server_cpu": server_share,
        "generator_cpu": sum(samples["busy"][0] for samples in found) / num_processes,
        "server_us_per_exchange": server_share / rate * 1e6,
    }


def _table(options: ScaleOptions, results: dict[str, dict[str, dict[str, float]]]) -> RenderableType:
    columns = ["transport, workers", "exchanges/s", "ms each", "server's CPU", "us of it each", "generator's CPU"]
    rows = [
        [
            f"{transport}, {int(workers):,}",
            f"{item['exchanges_per_s']:,.0f}",
            f"{item['per_worker_ms']:,.2f}",
            f"{item['server_cpu']:.0%}",
            f"{item['server_us_per_exchange']:,.0f}",
            f"{item['generator_cpu']:.0%}",
        ]
        for transport, found in results.items()
        for workers, item in found.items()
    ]
    title = f"{options.floats:,} floats, {options.mode}, {options.optimizer}; {options.seconds:g} s each"
    processes = "process plays" if options.generators == 1 else "processes play"
    here: dict[str, Any] = machine()
    note = f"CPU in shares of one core, of {here['cores']}; {options.generators} {processes} the workers"
    return page(title, number_table(columns, rows), notes=[note])
