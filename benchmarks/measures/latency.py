"""How long a small exchange takes, beside a bare gRPC ping-pong of the same size, and beside peers.

All are measured in turns of a tenth of the exchanges each, so that a noisy machine disturbs all alike.
The exchange includes everything behind `optimizer.step()`: the gathering of gradients, both messages,
the check for NaN, the fold and the server's optimizer step. The ping-pong is an open stream between
two processes; a peer's exchange is one call that carries gradients there and weights back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from ..output.report import Report, median, percentile
from ..output.tables import figures, page
from ..peers.run import chosen_running
from ..rig.echo import echo_stream
from ..rig.server_process import running_server
from ..rig.turns import Contestant, Measured, Samples, measure, timed
from ..rig.worker_run import joined_worker

_NUM_TURNS = 10
_OURS, _PING = "exchange", "ping"


@dataclass(frozen=True)
class LatencyOptions:
    floats: int
    exchanges: int
    mode: str
    optimizer: str

    @property
    def num_warmup(self) -> int:
        return max(1, self.exchanges // _NUM_TURNS)


def measure_latency(options: LatencyOptions, peer_names: Sequence[str] = ()) -> Report:
    """Ours, the ping-pong, and those peers that are installed."""
    with chosen_running(peer_names, "latency") as (peers, lines):
        contestants: dict[str, Callable[[], Contestant]] = {
            _OURS: partial(_exchanges, options),
            _PING: partial(_pings, options.floats * 4),
        }
        contestants |= {peer.name: partial(peer.latency, options.floats) for peer in peers}
        found = measure(
            contestants,
            num_turns=_NUM_TURNS,
            per_turn=options.exchanges // _NUM_TURNS,
            warmup=options.num_warmup,
        )
    results = {name: _figures(samples) for name, samples in found.items()}
    results["ratio"] = _ratio(results[_OURS], results[_PING])
    results["peer_ratios"] = {peer.name: _ratio(results[peer.name], results[_OURS]) for peer in peers}
    config = {
        **vars(options),
        "payload_bytes": options.floats * 4,
        "warmup": options.num_warmup,
        "peers": [peer.name for peer in peers],
    }
    return Report("latency", config, results, _table(options, results, [peer.name for peer in peers], lines))


@contextmanager
def _exchanges(options: LatencyOptions) -> Iterator[Measured]:
    num_steps = options.num_warmup + options.exchanges + 1
    flags = ("--mode", options.mode, "--workers", "1", "--steps", str(num_steps), "--set", "policy.local_steps=1")
    with (
        running_server(*flags) as server,
        joined_worker(server.address, 0, options.floats, options.optimizer) as worker,
    ):
        yield timed("exchange", worker.optimizer.step)


@contextmanager
def _pings(num_bytes: int) -> Iterator[Measured]:
    payload = bytes(num_bytes)
    with echo_stream() as stream:
        yield timed("exchange", lambda: stream.ping(payload))


def _figures(samples: Samples) -> dict[str, Any]:
    times_us = [seconds * 1e6 for seconds in samples["exchange"]]
    return {
        "median_us": median(times_us),
        "p90_us": percentile(times_us, 0.90),
        "p99_us": percentile(times_us, 0.99),
        "best_us": min(times_us),
    }


def _ratio(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] / other[name] for name in other}


def _table(
    options: LatencyOptions, results: dict[str, dict[str, Any]], peers: list[str], lines: list[str]
) -> RenderableType:
    names = {"exchange, optimizer step included": _OURS, "bare gRPC ping-pong": _PING, **{name: name for name in peers}}
    rows = [[shown, *(f"{value:,.0f} us" for value in results[name].values())] for shown, name in names.items()]
    rows.append(["exchange / ping-pong", *(f"{value:.2f}" for value in results["ratio"].values())])
    for name, ratio in results["peer_ratios"].items():
        rows.append([f"{name} / exchange", *(f"{value:.2f}" for value in ratio.values())])
    title = f"{options.floats:,} floats, {options.mode}, {options.optimizer}; {options.exchanges:,} exchanges"
    return page(title, figures(["", "median", "p90", "p99", "best"], rows, bold=[0]), notes=lines)
