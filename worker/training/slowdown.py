"""Artificial delays, which make equal machines unequal to try the modes out (`slowdown` in the configuration)."""

from __future__ import annotations

import random

from ...common.config.schema import SlowdownConfig


class Slowdown:
    """The delay for each step of one rank, in seconds; equal seeds give equal delays.

    A slow step takes `straggler_factor` times its usual time, including added delays. With one permanently slow rank,
    ssp becomes as slow as sync. Random stragglers are the case in which ssp is faster.
    """

    def __init__(self, config: SlowdownConfig, rank: int, seed: int) -> None:
        self._base_s, self._jitter_s, self._factor = config.base_s, config.jitter_s, config.straggler_factor
        self._every = config.straggler_every if rank == config.straggler_rank else None
        self._probability = config.straggler_probability
        self._random = random.Random(seed * 1_000_003 + rank).random

    def delay_s(self, step: int, compute_s: float) -> float:
        """Return the seconds to sleep after step `step` (from 1), which took `compute_s` seconds."""
        delay_s = self._base_s + self._jitter_s * self._random()
        if self._every is not None:
            is_slow = step % self._every == 0
        else:
            is_slow = self._probability > 0 and self._random() < self._probability
        if is_slow:
            delay_s += (self._factor - 1) * (compute_s + delay_s)
        return delay_s
