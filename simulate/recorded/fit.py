"""Fits computing and exchange of each rank on the first half of a recorded run, and predicts the second. Pure.

The time from a reply to the rank's next contribution belongs to the worker, its links and the server. The time from a
contribution to its reply belongs to the mode, which decides in the simulation too, so it is not fitted. The fit of a
rank is a list of pairs: seconds of computing, and of the rest. The simulation takes them in the recorded order, so it
repeats drift and moments that slow all workers. The fit leaves out the first tenth, in which processes warm up. If the
user gives links, only the computing is fitted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ...common.config.schema import Config
from ...common.errors import UsageError
from ...drills.history_lines import Line
from ...ps.core import effects
from ...ps.observe.history import line_of
from ..machines.world import World
from ..plan import changed
from ..run.simulation import Simulation
from ..traffic.framing import Framing

_FEWEST = 4  # contributions of a rank in the first half
_COUNTING = ("accepted", "skipped")


class Cycle(NamedTuple):
    """One contribution that counts. Seconds; `exchange_s`: neither computing nor waiting for the mode."""

    rank: int
    at: float
    compute_s: float
    exchange_s: float
    gate_wait_s: float
    staleness: int
    num_steps: int = 0  # training steps; 0: of a later part of a step
    number: int = 0  # of the rank
    num_sent: int = -1  # bytes of the contribution; -1: not recorded
    num_received: int = -1  # bytes of the reply to the contribution before


@dataclass(frozen=True)
class Half:
    """Measurements of some contributions: their rate per second, and the share of time spent waiting."""

    num: int
    rate: float
    wait_share: float
    staleness: tuple[int, ...]  # sorted
    num_sent: int = 0  # bytes, framing included; 0: not recorded
    num_received: int = 0


@dataclass(frozen=True)
class Calibration:
    """The accuracy of the prediction of the second half, which is `recorded`."""

    recorded: Half
    foreseen: Half
    world: World  # fitted
    exchange_s: float  # mean
    extra: tuple[float, float]  # bytes up and down of an exchange that the framing does not count, in the first half

    @property
    def rate_error(self) -> float:
        """The error of the rate, relative to the recorded rate."""
        return self.foreseen.rate / self.recorded.rate - 1

    @property
    def staleness_distance(self) -> float:
        """The Kolmogorov-Smirnov statistic: the largest difference of the distributions, 0..1."""
        item, other = self.recorded.staleness, self.foreseen.staleness
        return max(
            abs(bisect_right(item, x) / len(item) - bisect_right(other, x) / len(other)) for x in {*item, *other}
        )

    def outside(self, world: World) -> list[str]:
        """Returns the properties of a world that differ from the recording by more than ten times, as phrases."""
        found = []
        if _is_far(world.num_workers, self.world.num_workers):
            found.append(f"{world.num_workers:,} workers, {self.world.num_workers} recorded")
        own_s = world.sizes.up / world.up + world.sizes.down / world.down + world.latency_s
        own_s += world.sizes.up / world.server_up + world.sizes.down / world.server_down
        if own_s and self.exchange_s and _is_far(own_s, self.exchange_s):
            found.append(f"an exchange of {own_s:.3g} s, {self.exchange_s:.3g} s recorded")
        return found


def calibrate(lines: Iterable[Line], config: Config, framing: Framing | None = None) -> Calibration:
    """Fit a recorded run by the server's history. Raises UsageError if the history is incomplete.

    `config`: its mode, options and length. If `framing` is given, bytes are predicted too.
    """
    found = cycles((line.op, line["t"], line.fields) for line in lines if line.role == "server")
    middle = len(found) // 2
    if not any(cycle.compute_s for cycle in found):
        raise UsageError("the history has no computing times, because the run did not finish")
    if config.policy.delayed_update:
        raise UsageError(
            "policy.delayed_update: a history does not separate computing from the exchange meanwhile",
            fix="record a run without, and simulate with --set policy.delayed_update=true",
        )
    ranks = sorted({cycle.rank for cycle in found})
    pairs: dict[int, list[tuple[float, float]]] = {rank: [] for rank in ranks}
    most = max(cycle.num_steps for cycle in found) or 1
    for cycle in found[:middle]:  # as if all had equal steps: `Recorded` scales a contribution with fewer steps
        pairs[cycle.rank].append((cycle.compute_s * most / (cycle.num_steps or most), cycle.exchange_s))
    few = [rank for rank in ranks if len(pairs[rank]) < _FEWEST]
    if few or ranks != list(range(len(ranks))):
        which = few[0] if few else ranks[-1]
        raise UsageError(
            f"rank {which} has {len(pairs[which])} contributions in the first half of the history, but {_FEWEST} are "
            "needed of each rank from 0 on",
            fix="record a longer run of workers that all stay",
        )
    recorded = tuple(tuple(pairs[rank][-(-len(pairs[rank]) // 10) :]) for rank in ranks)
    world = World(num_workers=len(ranks), recorded=recorded, max_staged=1 << 20, framing=framing)
    again = _simulated(config, world)
    extra = _extra(found[:middle], again) if framing is not None else (0.0, 0.0)
    foreseen, num = measured(again[middle:], again[middle - 1].at), sum(item.num_sent >= 0 for item in again[middle:])
    sent, received = (round(num_bytes) * num for num_bytes in extra)
    return Calibration(
        measured(found[middle:], found[middle - 1].at),
        replace(foreseen, num_sent=foreseen.num_sent + sent, num_received=foreseen.num_received + received),
        world,
        sum(exchange_s for cycle in recorded for _, exchange_s in cycle) / sum(map(len, recorded)),
        extra,
    )


def _extra(recorded: Sequence[Cycle], again: Sequence[Cycle]) -> tuple[float, float]:
    """Returns the median bytes of a contribution and of a reply that the framing does not count."""
    counted = {(cycle.rank, cycle.number): cycle for cycle in again}
    known = [cycle for cycle in recorded if cycle.num_sent >= 0 and (cycle.rank, cycle.number) in counted]
    pairs = [(cycle, counted[cycle.rank, cycle.number]) for cycle in known]
    if not pairs:
        return 0.0, 0.0
    up = median(item.num_sent - other.num_sent for item, other in pairs)
    return up, median(item.num_received - other.num_received for item, other in pairs)


def _simulated(config: Config, world: World) -> list[Cycle]:
    lines: list[tuple[str, float, dict[str, Any]]] = []

    def observe(at: float, fact: effects.Fact) -> None:
        op, fields = line_of(fact)
        lines.append((op, at, fields))

    Simulation(changed(config, run={"workers": world.num_workers}), world, observe=observe).go()
    return cycles(lines)


def fitted(calibration: Calibration, world: World, has_links: bool) -> World:
    """Returns `world` with the recorded computing; unless the user gave links (`has_links`), also with the recorded
    exchanges, and nothing else that takes time."""
    pairs, framing = calibration.world.recorded, world.framing
    if framing is not None:
        world = replace(world, framing=replace(framing, extra=calibration.extra))
    if has_links:
        return replace(world, recorded=tuple(tuple((compute_s, 0.0) for compute_s, _ in pair) for pair in pairs))
    return World(
        num_workers=world.num_workers, seed=world.seed, max_staged=1 << 20, recorded=pairs, sizes=world.sizes,
        framing=world.framing,
    )  # fmt: skip


def cycles(lines: Iterable[tuple[str, float, dict[str, Any]]]) -> list[Cycle]:
    """Of (operation, time, fields) of a history, in the order in which contributions were replied, ranks from their
    first reply on."""
    free_at: dict[int, float] = {}  # by rank: when it could go on
    open_: dict[int, Cycle] = {}  # by rank: came, and is not replied
    found: list[Cycle] = []
    counted: dict[int, Sequence[int]] = {}  # bytes by rank, with its newest contribution
    for op, at, fields in lines:
        if op == "start" and "mode" in fields:
            free_at, open_, found, counted = {}, {}, [], {}  # the newest run of the file
        elif op == "accept" and fields["outcome"] in _COUNTING and (rank := fields["rank"]) in free_at:
            compute_s = fields.get("compute_s", 0.0)
            exchange_s = max(0.0, at - free_at[rank] - compute_s)
            staleness = fields["version"] - fields["base_version"]
            before, now = counted.get(rank, ()), fields.get("bytes", ())
            sent, received = (now[0] - before[0], now[1] - before[1]) if before and now else (-1, -1)
            open_[rank] = Cycle(
                rank, at, compute_s, exchange_s, 0.0, staleness, fields["num_steps"], fields["seq"], sent, received
            )
            counted[rank] = now
        elif op == "reply":
            rank = fields["rank"]
            free_at[rank] = at
            if rank in open_:
                cycle = open_.pop(rank)
                found.append(cycle._replace(gate_wait_s=at - cycle.at))
        elif op in ("leave", "join"):
            free_at.pop(fields["rank"], None)
            open_.pop(fields["rank"], None)
    return sorted(found, key=lambda cycle: cycle.at)


def measured(found: Sequence[Cycle], since: float) -> Half:
    """Of contributions after the moment `since`."""
    elapsed_s = found[-1].at - since if found else 0.0
    gate_wait_s = sum(cycle.gate_wait_s for cycle in found)
    total_s = gate_wait_s + sum(cycle.compute_s + cycle.exchange_s for cycle in found)
    return Half(
        len(found),
        len(found) / elapsed_s if elapsed_s else 0.0,
        gate_wait_s / total_s if total_s else 0.0,
        tuple(sorted(cycle.staleness for cycle in found)),
        sum(max(0, cycle.num_sent) for cycle in found),
        sum(max(0, cycle.num_received) for cycle in found),
    )


def _is_far(value: float, other: float) -> bool:
    return not 0.1 <= value / other <= 10
