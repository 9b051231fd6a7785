"""How many small exchanges a server carries when many workers are there at once.

Real processes would measure themselves (a torch process a worker, on a few cores), so few processes
play the workers (swarm.py). What they need themselves is shown beside the server's share: where both
together use up the cores, the figure is the machine's, and the server could do more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from ..output.machine import machine
from ..output.report import Report
from ..output.tables import figures, page
from ..rig.ours import lanes_of
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
    lane: str


def measure_scale(options: ScaleOptions) -> Report:
    """A server for each number of workers, one after another."""
    lanes = [lane for lane in lanes_of(options.lane) if lane != "shared"] or ["direct"]  # a small body is never shared
    results = {lane: {str(workers): _measure(options, workers, lane) for workers in options.workers} for lane in lanes}
    return Report("scale", vars(options), {"lanes": results}, _table(options, results))


def _measure(options: ScaleOptions, num_workers: int, lane: str) -> dict[str, float]:
    """Exchanges/s of all workers, and shares of one core."""
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
        swarm = SwarmOptions(server.address, server.pid, options.floats, options.optimizer, options.seconds, lane)
        with team(num_processes, swarm_life, num_processes, num_workers, swarm) as generators:
            found = generators.turns(1)
    rate = sum(one["rate"][0] for one in found)
    server_share = sum(one["server"][0] for one in found) / num_processes
    return {
        "exchanges_per_s": rate,
        "per_worker_ms": num_workers / rate * 1e3,
        "server_cpu": server_share,
        "generator_cpu": sum(one["busy"][0] for one in found) / num_processes,
        "server_us_per_exchange": server_share / rate * 1e6,
    }


def _table(options: ScaleOptions, results: dict[str, dict[str, dict[str, float]]]) -> RenderableType:
    columns = ["lane, workers", "exchanges/s", "ms each", "server's CPU", "us of it each", "generator's CPU"]
    rows = [
        [
            f"{lane}, {int(workers):,}",
            f"{one['exchanges_per_s']:,.0f}",
            f"{one['per_worker_ms']:,.2f}",
            f"{one['server_cpu']:.0%}",
            f"{one['server_us_per_exchange']:,.0f}",
            f"{one['generator_cpu']:.0%}",
        ]
        for lane, found in results.items()
        for workers, one in found.items()
    ]
    title = f"{options.floats:,} floats, {options.mode}, {options.optimizer}; {options.seconds:g} s each"
    processes = "process plays" if options.generators == 1 else "processes play"
    here: dict[str, Any] = machine()
    note = f"CPU in shares of one core, of {here['cores']}; {options.generators} {processes} the workers"
    return page(title, figures(columns, rows), notes=[note])
