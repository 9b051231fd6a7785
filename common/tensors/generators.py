"""Random numbers of what a worker reads its data from: the same on all ranks, and apart from the script's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch

# How the generators of torch on the CPU, of Python and of NumPy give and take their states.
_GIVE = (torch.get_rng_state, random.getstate, np.random.get_state)
_TAKE: tuple[Callable[[Any], object], ...] = (torch.set_rng_state, random.setstate, np.random.set_state)


class Generators:
    """These generators for a source, seeded equally on all ranks."""

    def __init__(self, seed: int) -> None:
        numbers = np.random.RandomState(seed % 2**32)
        of_torch = torch.Generator().manual_seed(seed)
        self._states: list[Any] = [of_torch.get_state(), Random(seed).getstate(), numbers.get_state()]

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Use these instead of the process's generators, which go on afterwards where they were."""
        before = [give() for give in _GIVE]
        for take, state in zip(_TAKE, self._states, strict=True):
            take(state)
        try:
            yield
        finally:
            self._states = [give() for give in _GIVE]
            for take, state in zip(_TAKE, before, strict=True):
                take(state)
