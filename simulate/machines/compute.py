"""The durations of training steps of one simulated rank."""

from __future__ import annotations

import math
import random

from ...common.config.schema import SlowdownConfig
from ...worker.training.slowdown import Slowdown
from .world import World


class Compute:
    """The computing time of one rank's training steps, which depends only on the seed."""

    def __init__(self, world: World, rank: int) -> None:
        self._mean_s = world.compute_s / world.speeds[rank % len(world.speeds)]
        variance = math.log(1 + world.jitter**2)
        self._sigma, self._shift = math.sqrt(variance), variance / 2
        self._gauss = random.Random(world.seed * 1_000_003 + rank + 0.5).gauss
        self._slowdown = None if world.slowdown == SlowdownConfig() else Slowdown(world.slowdown, rank, world.seed)
        self._num_steps = 0

    def exchange_s(self) -> float:
        """Returns seconds of an upload beyond links and latency."""
        return 0.0

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
        self._pairs = world.recorded[rank % len(world.recorded)]
        self._num = 0
        self._most = 1

    def exchange_s(self) -> float:
        return self._pairs[(self._num - 1) % len(self._pairs)][1]

    def take(self, num_steps: int) -> float:
        """Returns the seconds of a contribution. A last contribution with fewer steps takes less."""
        self._num, self._most = self._num + 1, max(self._most, num_steps)
        return self._pairs[(self._num - 1) % len(self._pairs)][0] * num_steps / self._most
