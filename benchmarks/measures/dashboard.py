"""Measures what the run store, the dashboard and its viewers cost a server.

Workers exchange at a fixed pace, so all variants do the same work, and additional CPU time of the server is the cost. A
viewer is a connection that reads every event that the dashboard would show.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rich.console import RenderableType

from ..output.machine import machine
from ..output.report import Report, median
from ..output.tables import number_table, page
from ..rig.server_process import ServerProcess, running_server, watching
from ..rig.swarm import SwarmOptions, swarm_life
from ..rig.team import team

_STEPS = 1_000_000_000
_START_S = 30.0


@dataclass(frozen=True)
class DashboardOptions:
    workers: int
    viewers: int
    per_s: float
    floats: int
    seconds: float
    runs: int


def measure_dashboard(options: DashboardOptions) -> Report:
    """Measure all variants in turns, each with its own server; medians."""
    parts = ("store", "dashboard", "viewers")
    variants = {
        "neither": (),
        "store": parts[:1],
        "dashboard": parts[1:2],
        "both": parts[:2],
        "both, with viewers": parts,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(options.runs):
        for name, with_parts in variants.items():
            found[name].append(_measure(options, with_parts))
    results = {
        name: {key: median([item[key] for item in items_]) for key in items_[0]} for name, items_ in found.items()
    }
    bare = results["neither"]["server_cpu"]
    for result in results.values():
        result["more_cpu"] = result["server_cpu"] - bare
    return Report("dashboard", vars(options), results, _table(options, results))


def _measure(options: DashboardOptions, with_parts: tuple[str, ...]) -> dict[str, float]:
    """Returns exchanges/s, and the server's share of a core."""
    with ExitStack() as stack:
        flags = ["--mode", "async", "--workers", str(options.workers), "--steps", str(_STEPS)]
        if "store" in with_parts:
            flags += stack.enter_context(watching("store"))
        if "dashboard" in with_parts:
            flags += stack.enter_context(watching("dashboard"))
        server = stack.enter_context(running_server(*flags))
        pace_s = options.workers / options.per_s
        swarm = SwarmOptions(server.address, server.pid, options.floats, "sgd", options.seconds, "direct", pace_s)
        players = stack.enter_context(team(1, swarm_life, 1, options.workers, swarm))
        if "viewers" in with_parts:
            stack.enter_context(_viewers(server, options.viewers))
        (item,) = players.turns(1)
    return {"exchanges_per_s": item["rate"][0], "server_cpu": item["server"][0]}


@contextmanager
def _viewers(server: ServerProcess, count: int) -> Iterator[None]:
    """Connections that read all events until the end of the block."""
    address = str(server.wait_for("dashboard", _START_S)["address"])
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(count):
            item = stack.enter_context(socket.create_connection((host, int(port)), timeout=None))
            item.sendall(f"GET /api/events?run=live HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            threading.Thread(target=_read, args=(item,), daemon=True).start()
        yield


def _read(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 16):
            pass
    except OSError:
        return  # closed at the end of the block


def _table(options: DashboardOptions, results: dict[str, dict[str, float]]) -> RenderableType:
    rows = [
        [name, f"{result['exchanges_per_s']:,.0f}", f"{result['server_cpu']:.2%}", f"{result['more_cpu']:+.2%}"]
        for name, result in results.items()
    ]
    title = f"{options.workers} workers, {options.viewers} viewers, {options.seconds:g} s each, {options.runs} times"
    note = f"CPU in shares of one core, of {machine()['cores']}; medians"
    return page(title, number_table(["", "exchanges/s", "server's CPU", "more"], rows), notes=[note])
