"""The machines and links of a simulated run, and the durations of training steps."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

from ...common.config.schema import SlowdownConfig
from ...worker.training.slowdown import Slowdown
from ..traffic.sizes import Framing, Sizes


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
    server_down: float = math.inf  # of the server's own link, for its uploads
    server_up: float = math.inf
    fold_s: float = 0.0  # to add one contribution to a mean
    step_s: float = 0.0  # from a mean to a version
    sizes: Sizes = field(default_factory=Sizes)
    framing: Framing | None = None  # None: only payloads are counted
    max_staged: int = 4  # uploads in the server's memory
    mtbf_s: float = math.inf  # mean time of a worker between two failures
    back_s: float = 30.0  # from a failure until its next process joins
    label: str = ""  # of the run, in results; empty: its mode
    trains_on: bool = False  # workers are relays of regions that train on during an exchange
    behind: int = 1  # workers behind each worker, which is the relay of a region
    ideal: float = 0.0  # training steps a second if all workers only computed; 0: as its own workers compute
    joins_at: tuple[float, ...] = ()  # when the last ranks join, ascending; all others at 0
    # Instead of these: seconds of computing and exchange of each rank's contributions (`recorded/replay.py`).
    recorded: tuple[tuple[tuple[float, float], ...], ...] = ()


class Compute:
    """The computing time of one rank's training steps, which depends only on the seed."""

    exchange_s = 0.0  # of an upload, beyond links and latency

    def __init__(self, world: World, rank: int) -> None:
        self._mean_s = world.compute_s / world.speeds[rank % len(world.speeds)]
        variance = math.log(1 + world.jitter**2)
        self._sigma, self._shift = math.sqrt(variance), variance / 2
        self._gauss = random.Random(world.seed * 1_000_003 + rank + 0.5).gauss
        self._slowdown = None if world.slowdown == SlowdownConfig() else Slowdown(world.slowdown, rank, world.seed)
        self._num_steps = 0

    def take(self, num_steps: int) -> float:
        """Returns the seconds of the next training steps."""
        mean_s, sigma, slowdown, whole_s = self._mean_s, self._sigma, self._slowdown, 0.0
        if not sigma and slowdown is None:
            return mean_s * num_steps
        for _ in range(num_steps):
            step_s = mean_s
            if sigma:
                step_s *= math.exp(sigma * self._gauss(0.0, 1.0) - self._shift)
            if slowdown is not None:
                self._num_steps += 1
                step_s += slowdown.delay_s(self._num_steps, step_s)
            whole_s += step_s
        return whole_s


class Recorded(Compute):
    """The recorded times of one rank's contributions, repeated in their order."""

    def __init__(self, world: World, rank: int) -> None:
        self._pairs = itertools.cycle(world.recorded[rank % len(world.recorded)])
        self._most = 1

    def take(self, num_steps: int) -> float:
        """Returns the seconds of a contribution. A last contribution with fewer steps takes less."""
        compute_s, self.exchange_s = next(self._pairs)
        self._most = max(self._most, num_steps)
        return compute_s * num_steps / self._most
