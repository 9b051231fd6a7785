"""`worker.codec=auto`: which codec contributions go up in, from what was measured. Bytes are raw ones, of one
contribution; speeds are bytes a second, of what is encoded (before) or decoded (after).

A way of S bytes in a codec of ratio r takes S/E + S/(r B) + S/D; a step T computing, both ways, and one round trip L. A
codec pays where the link is slower than B* = (1 - 1/r) / (1/E + 1/D).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

ORDER = ("raw", "bf16", "int8", "q4")  # the least lossy first
WANTED = 0.9  # of a step is computing
MIN_GAIN = 1.2  # steps/s, of another choice than the one there is
_AS_GOOD = 1.05  # where none is as wanted: as the fastest
_LOCAL_STEPS = (10, 25, 50, 100, 500)


class Cost(NamedTuple):
    """Of a codec, with this model on this machine."""

    ratio: float = 1.0
    encode: float = math.inf  # E, with what error feedback adds
    decode: float = math.inf  # D

    @property
    def pays_below(self) -> float:
        """B*, bytes a second; 0: never."""
        seconds = 1 / self.encode + 1 / self.decode
        gain = 1 - 1 / self.ratio
        if gain <= 0:
            return 0.0
        return gain / seconds if seconds else math.inf

    def seconds(self, num_bytes: float, bandwidth: float) -> float:
        """Of one way."""
        return num_bytes * (1 / self.encode + 1 / (self.ratio * bandwidth) + 1 / self.decode)


class Measured(NamedTuple):
    """Of a worker's link and loop."""

    num_bytes: int  # S
    up: float  # B, bytes a second; both may be infinite
    down: float
    compute_s: float  # T, of all steps of a contribution
    round_trip_s: float  # L
    local_steps: int = 1
    is_delayed: bool = False  # the next contribution is computed meanwhile

    def exchange_s(self, up: Cost, down: Cost) -> float:
        return up.seconds(self.num_bytes, self.up) + down.seconds(self.num_bytes, self.down) + self.round_trip_s

    def period_s(self, up: Cost, down: Cost) -> float:
        """From one contribution to the next."""
        exchange_s = self.exchange_s(up, down)
        return max(self.compute_s, exchange_s) if self.is_delayed else self.compute_s + exchange_s


class Choice(NamedTuple):
    codec: str
    periods: dict[str, float]  # predicted seconds of each candidate, the least lossy first
    diloco: tuple[str, int] | None  # where none is as wanted: a codec, both ways, and local steps with which it is


def choose(measured: Measured, costs: Mapping[str, Cost], replies: Cost, current: str | None = None) -> Choice:
    """The least lossy of `costs` with which WANTED of a step is computing; where there is none, one that is as fast as
    the fastest. `current` stays where another is not MIN_GAIN faster; None: nothing was chosen yet."""
    periods = {name: measured.period_s(costs[name], replies) for name in ORDER if name in costs}
    good = [name for name, period_s in periods.items() if measured.compute_s >= WANTED * period_s]
    fastest_s = min(periods.values())
    chosen = (good or [name for name, period_s in periods.items() if period_s <= _AS_GOOD * fastest_s])[0]
    if current in periods and periods[current] < MIN_GAIN * periods[chosen]:
        chosen = current
    return Choice(chosen, periods, None if good else _diloco(measured, costs))


def _diloco(measured: Measured, costs: Mapping[str, Cost]) -> tuple[str, int] | None:
    """The fewest local steps with which WANTED would be reached, in a codec both ways."""
    share = WANTED if measured.is_delayed else WANTED / (1 - WANTED)
    of_step_s = measured.compute_s / measured.local_steps
    for name in ("int8", "q4"):
        if name in costs:
            exchange_s = measured.exchange_s(costs[name], costs[name])
            for local_steps in _LOCAL_STEPS:
                if local_steps * of_step_s >= share * exchange_s:
                    return name, local_steps
    return None
