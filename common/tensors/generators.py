"""Random numbers of what a worker reads its data from: the same on all ranks, and apart from the script's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch


class Generators:
    """The generators of torch on the CPU, Python and NumPy for a source, seeded equally on all ranks."""

    def __init__(self, seed: int) -> None:
        numbers = np.random.RandomState(seed % 2**32)
        self._states = torch.Generator().manual_seed(seed).get_state(), Random(seed).getstate(), numbers.get_state()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Use these instead of the process's generators, which go on afterwards where they were."""
        before = _states()
        _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(before)


def _states() -> tuple[torch.Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
