"""`worker.codec=auto`: the rule that chooses a codec from measurements.

Bytes are those of a raw contribution. Speeds are raw bytes per second, for encoding and for decoding. One way of S
bytes with a codec of ratio r takes S/E + S/(r B) + S/D. A training step takes the compute time T, both ways and a round
trip L. A codec pays if the link is slower than B* = (1 - 1/r) / (1/E + 1/D).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

ORDER = ("raw", "bf16", "int8", "q4")  # ordered from the least lossy
WANTED = 0.9  # wanted share of compute time in a step
MIN_GAIN = 1.2  # needed gain in steps/s before another codec is chosen
_AS_GOOD = 1.05  # if no codec reaches WANTED: the tolerance to the fastest one
_LOCAL_STEPS = (10, 25, 50, 100, 500)


class Cost(NamedTuple):
    """Ratio and speeds of a codec, with this model on this machine."""

    ratio: float = 1.0
    encode: float = math.inf  # E, including error feedback
    decode: float = math.inf  # D

    @property
    def pays_below(self) -> float:
        """B* in bytes per second; 0: the codec never pays."""
        seconds = 1 / self.encode + 1 / self.decode
        gain = 1 - 1 / self.ratio
        if gain <= 0:
            return 0.0
        return gain / seconds if seconds else math.inf

    def seconds(self, num_bytes: float, bandwidth: float) -> float:
        """Seconds for one way."""
        return num_bytes * (1 / self.encode + 1 / (self.ratio * bandwidth) + 1 / self.decode)


class Measured(NamedTuple):
    """Figures of a worker's link and training loop."""

    num_bytes: int  # S
    up: float  # B, bytes per second; may be infinite, like `down`
    down: float
    compute_s: float  # T, of all training steps of a contribution
    round_trip_s: float  # L
    local_steps: int = 1
    is_delayed: bool = False  # the next contribution is computed during the exchange

    def exchange_s(self, up: Cost, down: Cost) -> float:
        return up.seconds(self.num_bytes, self.up) + down.seconds(self.num_bytes, self.down) + self.round_trip_s

    def period_s(self, up: Cost, down: Cost) -> float:
        """Seconds from one contribution to the next."""
        exchange_s = self.exchange_s(up, down)
        return max(self.compute_s, exchange_s) if self.is_delayed else self.compute_s + exchange_s


class Choice(NamedTuple):
    codec: str
    periods: dict[str, float]  # predicted seconds of each candidate, ordered from the least lossy
    # if no codec reaches WANTED: a codec for both ways, and the local steps that reach it
    diloco: tuple[str, int] | None


def choose(measured: Measured, costs: Mapping[str, Cost], replies: Cost, current: str | None = None) -> Choice:
    """Choose the least lossy codec of `costs` with which compute time is at least WANTED of a step.

    If there is none, choose the least lossy codec that is about as fast as the fastest. `current` stays unless the new
    one is MIN_GAIN faster. None: nothing was chosen yet.
    """
    periods = {name: measured.period_s(costs[name], replies) for name in ORDER if name in costs}
    good = [name for name, period_s in periods.items() if measured.compute_s >= WANTED * period_s]
    fastest_s = min(periods.values())
    chosen = (good or [name for name, period_s in periods.items() if period_s <= _AS_GOOD * fastest_s])[0]
    if current in periods and periods[current] < MIN_GAIN * periods[chosen]:
        chosen = current
    return Choice(chosen, periods, None if good else _diloco(measured, costs))


def _diloco(measured: Measured, costs: Mapping[str, Cost]) -> tuple[str, int] | None:
    """The fewest local steps that reach WANTED, with a codec in both ways; None: no tried number does."""
    share = WANTED if measured.is_delayed else WANTED / (1 - WANTED)
    of_step_s = measured.compute_s / measured.local_steps
    for name in ("int8", "q4"):
        if name in costs:
            exchange_s = measured.exchange_s(costs[name], costs[name])
            for local_steps in _LOCAL_STEPS:
                if local_steps * of_step_s >= share * exchange_s:
                    return name, local_steps
    return None
