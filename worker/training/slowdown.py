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
        self._config = config
        self._rank = rank
        self._random = random.Random(seed * 1_000_003 + rank)

    def delay_s(self, step: int, compute_s: float) -> float:
        """Return the seconds to sleep after step `step` (from 1), which took `compute_s` seconds."""
        config = self._config
        delay_s = config.base_s + config.jitter_s * self._random.random()
        if self._is_slow(step):
            delay_s += (config.straggler_factor - 1) * (compute_s + delay_s)
        return delay_s

    def _is_slow(self, step: int) -> bool:
        config = self._config
        if config.straggler_every is not None and self._rank == config.straggler_rank:
            return step % config.straggler_every == 0
        return config.straggler_probability > 0 and self._random.random() < config.straggler_probability
