"""Measures a small exchange beside a bare gRPC ping-pong of the same size, and beside baselines.

All are measured in turns of a tenth of the exchanges each, so that a noisy machine disturbs all alike.
The exchange includes everything behind `optimizer.step()`: the gathering of gradients, both messages,
the check for NaN, the fold and the server's optimizer step. The ping-pong is an open stream between
two processes; a baseline's exchange is one call that carries gradients there and weights back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from ..baselines.run import chosen_running
from ..output.report import Report, median, percentile
from ..output.tables import number_table, page
from ..rig.echo import echo_stream
from ..rig.ours import transports_of
from ..rig.server_process import running_server, watching
from ..rig.turns import Contestant, Measured, Samples, measure, timed
from ..rig.worker_run import joined_worker

_NUM_TURNS = 10
_PING = "ping"


@dataclass(frozen=True)
class LatencyOptions:
    floats: int
    exchanges: int
    mode: str
    optimizer: str
    transport: str
    watched: tuple[str, ...] = ()

    @property
    def transports(self) -> list[str]:
        """Returns the two transports: a small payload is in the message, never in shared memory."""
        return [transport for transport in transports_of(self.transport) if transport != "shared"] or ["direct"]

    @property
    def num_warmup(self) -> int:
        return max(1, self.exchanges // _NUM_TURNS)


def measure_latency(options: LatencyOptions, baseline_names: Sequence[str] = ()) -> Report:
    """Measure ours, the ping-pong, and installed baselines."""
    with chosen_running(baseline_names, "latency") as (baselines, lines):
        hows = ("", *options.watched)
        contestants: dict[str, Callable[[], Contestant]] = {
            **{
                _name(transport, how): partial(_exchanges, options, transport, how)
                for how in hows
                for transport in options.transports
            },
            _PING: partial(_pings, options.floats * 4),
        }
        contestants |= {baseline.name: partial(baseline.latency, options.floats) for baseline in baselines}
        found = measure(
            contestants, num_turns=_NUM_TURNS, per_turn=options.exchanges // _NUM_TURNS, warmup=options.num_warmup
        )
    results = {name: _metrics(samples) for name, samples in found.items()}
    others = [_PING, *(baseline.name for baseline in baselines)]
    results["ratios"] = {
        transport: {other: _ratio(results[transport], results[other]) for other in others}
        for transport in options.transports
    }
    for how in options.watched:
        for transport in options.transports:
            results["ratios"][_name(transport, how)] = {
                transport: _ratio(results[_name(transport, how)], results[transport])
            }
    config = {
        **vars(options),
        "payload_bytes": options.floats * 4,
        "warmup": options.num_warmup,
        "baselines": [baseline.name for baseline in baselines],
    }
    return Report("latency", config, results, _table(options, results, others, lines))


def _name(transport: str, how: str) -> str:
    return f"{transport}, {how}" if how else transport


@contextmanager
def _exchanges(options: LatencyOptions, transport: str, how: str) -> Iterator[Measured]:
    num_steps = options.num_warmup + options.exchanges + 1
    flags = ("--mode", options.mode, "--workers", "1", "--steps", str(num_steps), "--set", "policy.local_steps=1")
    with (
        watching(how) as more,
        running_server(*flags, *more) as server,
        joined_worker(server.address, 0, options.floats, options.optimizer, "raw", transport) as worker,
    ):
        yield timed("exchange", worker.optimizer.step)


@contextmanager
def _pings(num_bytes: int) -> Iterator[Measured]:
    payload = bytes(num_bytes)
    with echo_stream() as stream:
        yield timed("exchange", lambda: stream.ping(payload))


def _metrics(samples: Samples) -> dict[str, Any]:
    times_us = [seconds * 1e6 for seconds in samples["exchange"]]
    return {
        "median_us": median(times_us),
        "p90_us": percentile(times_us, 0.90),
        "p99_us": percentile(times_us, 0.99),
        "best_us": min(times_us),
    }


def _ratio(item: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: item[name] / other[name] for name in other}


def _table(
    options: LatencyOptions, results: dict[str, dict[str, Any]], others: list[str], lines: list[str]
) -> RenderableType:
    hows = ("", *options.watched)
    names = {
        _name(transport, how): f"exchange over {_name(transport, how)}"
        for how in hows
        for transport in options.transports
    }
    names |= {name: "bare gRPC ping-pong" if name == _PING else name for name in others}
    rows = [[shown, *(f"{value:,.0f} us" for value in results[name].values())] for name, shown in names.items()]
    for transport, ratios in results["ratios"].items():
        for other, ratio in ratios.items():
            rows.append([f"{transport} / {other}", *(f"{value:.3f}" for value in ratio.values())])
    title = f"{options.floats:,} floats, {options.mode}, {options.optimizer}; {options.exchanges:,} exchanges"
    return page(title, number_table(["", "median", "p90", "p99", "best"], rows, bold=[0]), notes=lines)
