"""What a simulated run is told of its machines and links, read from text with units."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field

from ..common.config.schema import SlowdownConfig
from ..common.errors import UsageError
from ..worker.training.slowdown import Slowdown

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([a-z/]*)", re.IGNORECASE)


@dataclass(frozen=True)
class World:
    """Bytes per second, seconds, bytes. A bandwidth of infinity costs no time."""

    num_workers: int = 2
    seed: int = 0
    compute_s: float = 0.1  # of a training step, mean
    jitter: float = 0.0  # its standard deviation, as a part of the mean (log-normal)
    speeds: tuple[float, ...] = (1.0,)  # rank r takes compute_s / speeds[r mod their number]
    slowdown: SlowdownConfig = field(default_factory=SlowdownConfig)
    down: float = math.inf  # of each worker's link
    up: float = math.inf
    latency_s: float = 0.0  # there and back
    server_down: float = math.inf  # of the server's own link, for what leaves it
    server_up: float = math.inf
    fold_s: float = 0.0  # to add one contribution to a mean
    step_s: float = 0.0  # from a mean to a version
    up_bytes: int = 0  # of a contribution
    down_bytes: int = 0  # of an answer with weights
    start_bytes: int = 0  # of the weights that a worker starts from
    max_staged: int = 4  # uploads that the server holds at once
    mtbf_s: float = math.inf  # mean time of a worker between two failures
    back_s: float = 30.0  # from a failure until its next process joins
    # Instead of all that: of each rank in turn, what its contributions took, computing and exchange (`fit.py`).
    recorded: tuple[tuple[tuple[float, float], ...], ...] = ()


class Compute:
    """Seconds that one rank's training steps take: the same for the same seed, whatever else happens in the run."""

    def __init__(self, world: World, rank: int) -> None:
        self._mean_s = world.compute_s / world.speeds[rank % len(world.speeds)]
        variance = math.log(1 + world.jitter**2)
        self._sigma, self._shift = math.sqrt(variance), variance / 2
        self._random = random.Random(world.seed * 1_000_003 + rank + 0.5)
        self._slowdown = None if world.slowdown == SlowdownConfig() else Slowdown(world.slowdown, rank, world.seed)
        self._num_steps = 0

    def exchange_s(self) -> float:
        """Seconds of the exchange on the way to the server, beyond what links and latency take."""
        return 0.0

    def take(self, num_steps: int) -> float:
        """Seconds of the next so many training steps."""
        if not self._sigma and self._slowdown is None:
            return self._mean_s * num_steps
        return sum(self._step() for _ in range(num_steps))

    def _step(self) -> float:
        self._num_steps += 1
        step_s = self._mean_s
        if self._sigma:
            step_s *= math.exp(self._sigma * self._random.gauss(0.0, 1.0) - self._shift)
        return step_s if self._slowdown is None else step_s + self._slowdown.delay_s(self._num_steps, step_s)


class Recorded(Compute):
    """What one rank's contributions took, again and again in the order in which they did."""

    def __init__(self, world: World, rank: int) -> None:
        self._pairs = world.recorded[rank % len(world.recorded)]
        self._num = 0
        self._most = 1

    def exchange_s(self) -> float:
        return self._pairs[(self._num - 1) % len(self._pairs)][1]

    def take(self, num_steps: int) -> float:
        """A last contribution has fewer steps than the others, and takes less."""
        self._num, self._most = self._num + 1, max(self._most, num_steps)
        return self._pairs[(self._num - 1) % len(self._pairs)][0] * num_steps / self._most


# ---- from text --------------------------------------------------------------------------------------


def seconds(flag: str, text: str) -> float:
    """`40ms`, `1.5s`. Raises UsageError."""
    return _quantity(flag, text, _SECONDS, "a time", "40ms")


def bandwidth(flag: str, text: str) -> tuple[float, float]:
    """`100mbit` or `500mbit/110mbit`, down and up: (down, up) in bytes per second. Raises UsageError."""
    one, is_two, other = text.partition("/") if not text.lower().endswith("b/s") else (text, "", "")
    down = _bytes_per_s(flag, one)
    return down, _bytes_per_s(flag, other) if is_two else down


def _bytes_per_s(flag: str, text: str) -> float:
    if text.strip().lower() in ("none", "inf"):
        return math.inf
    units = {unit: value / 8 for unit, value in _BITS.items()} | _BYTES
    return _quantity(flag, text, units, "a bandwidth", "100mbit, 12.5MB/s, or 500mbit/110mbit for down and up")


def _quantity(flag: str, text: str, units: dict[str, float], what: str, example: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    try:
        value = float(found[1]) * units[unit] if found else math.nan
    except (KeyError, ValueError):
        value = math.nan
    is_positive = value > 0 or (value == 0 and units is _SECONDS)
    if not math.isfinite(value) or not is_positive:
        known = ", ".join(units)
        raise UsageError(f"flag {flag}: '{text}' is not {what}: a positive number with {known}", fix=f"e.g. {example}")
    return value


def named(flag: str, text: str, names: tuple[str, ...]) -> dict[str, str]:
    """`p=0.1,x=5` with exactly these names. Raises UsageError."""
    parts = text.replace(" ", "").split(",")
    found = dict(part.partition("=")[::2] for part in parts)
    if set(found) != set(names) or len(parts) != len(names) or not all(found.values()):
        form = ",".join(f"{name}=..." for name in names)
        raise UsageError(f"flag {flag}: '{text}' is not of the form {form}")
    return found


def number(flag: str, text: str, least: float, most: float = math.inf) -> float:
    """A number in [least, most]. Raises UsageError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or math.isinf(value):
        limit = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise UsageError(f"flag {flag}: {text} is not a number {limit}")
    return value
