"""What an event costs does not grow with the number of workers: compared between few and many, and counted."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

import pytest

from paramserver.benchmarks.measures.alone.policies import Alone
from paramserver.common.registry import MODES

FEW, MANY = 100, 2_000
# What looks at every worker takes MANY / FEW times as long; what does not, the same but for caches.
WIDE = 5.0


@pytest.mark.parametrize("mode", MODES.names())
def test_an_event_takes_the_same_time_with_many_workers(mode: str) -> None:
    few, many = Alone(mode, FEW), Alone(mode, MANY)
    for kind in ("join", "round", "round", "tick", "finish"):
        cost = median(getattr(few, kind)()), median(getattr(many, kind)())
        assert cost[1] < WIDE * cost[0], f"{kind}: {cost[0] * 1e6:.1f} us with {FEW}, {cost[1] * 1e6:.1f} with {MANY}"


def counted_gates(alone: Alone) -> Counter[str]:
    """How often somebody's gate is asked."""
    policy, asked = alone.run.policy, Counter[str]()
    ask = policy._gate

    def gate(*arguments: Any) -> Any:
        asked["gates"] += 1
        return ask(*arguments)

    policy._gate = gate  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("mode", MODES.names())
def test_a_gate_is_asked_when_it_may_have_opened(mode: str) -> None:
    alone = Alone(mode, FEW)
    alone.join()
    asked = counted_gates(alone)
    for _ in range(3):
        alone.round()
    assert asked["gates"] <= 2 * 3 * FEW


def test_those_who_wait_for_a_rank_that_is_far_behind_are_not_asked_at_each_of_its_steps() -> None:
    alone = Alone("ssp", FEW, staleness=3)
    alone.join()
    alone.play([alone.left(0)])
    for _ in range(20):
        for rank in range(1, FEW):
            alone.contribute(rank)
    alone.play(alone.joining(0))
    for rank in range(1, FEW):
        alone.contribute(rank)
    asked = counted_gates(alone)
    for _ in range(10):
        alone.contribute(0)
    assert asked["gates"] <= 2 * 10
    for _ in range(10):
        alone.contribute(0)
    assert not alone.run.policy.waiting(alone.now), "it has caught up"
    assert asked["gates"] <= 2 * 20 + 2 * FEW
