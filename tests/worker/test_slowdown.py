"""Delays that make equal machines unequal: the same for the same seed, and of the size they say."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.config.schema import SlowdownConfig
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Row
from paramserver.worker.session import Length, Progress
from paramserver.worker.training.optimizer import ExchangeOptimizer
from paramserver.worker.training.position.data import DataPosition
from paramserver.worker.training.position.memory import Memory
from paramserver.worker.training.position.steps import Steps
from paramserver.worker.training.slowdown import Slowdown

from .test_optimizer import Run


def delays(rank: int = 0, seed: int = 0, compute_s: float = 0.1, count: int = 200, **config: Any) -> list[float]:
    slowdown = Slowdown(SlowdownConfig(**config), rank, seed)
    return [slowdown.delay_s(step, compute_s) for step in range(1, count + 1)]


def test_by_default_nothing_is_added() -> None:
    assert set(delays()) == {0.0}


def test_jitter_is_uniform_from_nothing_to_its_size() -> None:
    found = delays(base_s=1.0, jitter_s=0.5, count=2000)
    assert 1.0 <= min(found) < 1.02
    assert 1.48 < max(found) <= 1.5
    assert sum(found) / len(found) == pytest.approx(1.25, abs=0.02)


@pytest.mark.parametrize(
    "config", [{"jitter_s": 0.5}, {"straggler_probability": 0.3}, {"jitter_s": 0.1, "straggler_probability": 0.5}]
)
def test_the_same_seed_and_rank_give_the_same_delays(config: dict[str, float]) -> None:
    runs = {(rank, seed): delays(rank, seed, **config) for rank, seed in itertools.product(range(3), range(3))}
    assert runs == {(rank, seed): delays(rank, seed, **config) for rank, seed in runs}
    assert len({tuple(run) for run in runs.values()}) == len(runs), "others give others"


@given(factor=st.floats(1, 20), base_s=st.floats(0, 2), compute_s=st.floats(0, 5))
def test_a_slow_step_takes_factor_times_the_step(factor: float, base_s: float, compute_s: float) -> None:
    """Added delays included: compute and delay together are factor times compute and base."""
    config = SlowdownConfig(base_s=base_s, straggler_rank=1, straggler_every=3, straggler_factor=factor)
    slowdown = Slowdown(config, 1, 0)
    for step in range(1, 10):
        expected = (factor if step % 3 == 0 else 1.0) * (compute_s + base_s)
        assert compute_s + slowdown.delay_s(step, compute_s) == pytest.approx(expected)


def test_random_stragglers_come_with_their_probability() -> None:
    found = delays(straggler_probability=0.2, straggler_factor=5.0, count=3000)
    assert {round(delay, 9) for delay in found} == {0.0, 0.4}
    assert sum(delay > 0 for delay in found) / 3000 == pytest.approx(0.2, abs=0.03)
    assert set(delays(straggler_probability=1.0, straggler_factor=5.0)) == {0.4}


def test_what_is_slow_is_a_training_step_also_where_a_contribution_has_several() -> None:
    """A rank that comes back after two contributions of four steps each goes on with its ninth step."""
    seen: list[int] = []
    slowdown = SimpleNamespace(delay_s=lambda step, compute_s: seen.append(step) or 0.0)
    progress = Progress(row=Row(2, 8), local_steps=4, steps_left=4)
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=0.1)
    strategy = Run(ContributionKind.WEIGHTS)
    strategy.progress = progress
    optimizer = ExchangeOptimizer(inner, Steps(Memory(DataPosition(strategy, [inner], Length())), slowdown))
    optimizer.step()
    optimizer.step()
    assert seen == [9, 10]
