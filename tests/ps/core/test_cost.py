"""What an event costs does not grow with the number of workers: compared between few and many, counted, measured."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import pytest

from paramserver.benchmarks.measures.in_process.policies import Alone
from paramserver.common.registry import MODES

FEW, MANY = 100, 2_000
# What looks at every worker takes MANY / FEW times as long; what does not, the same but for caches.
WIDE = 5.0
# N21, in every mode, where a plain loop takes LOOP_S of the thread's time; on slower machines so much more.
MOST_S, VERY_MANY = 50e-6, 10_000
LOOP_S = 0.010
NUM_OF_JOIN = 4  # events


@pytest.mark.parametrize(
    "mode", [mode if mode in ("sync", "ssp") else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES.names()]
)
def test_an_event_takes_the_same_time_with_many_workers(mode: str) -> None:
    few, many = Alone(mode, FEW), Alone(mode, MANY)
    for kind in ("join", "round", "round", "tick", "finish"):
        cost = median(getattr(few, kind)()), median(getattr(many, kind)())
        assert cost[1] < WIDE * cost[0], f"{kind}: {cost[0] * 1e6:.1f} us with {FEW}, {cost[1] * 1e6:.1f} with {MANY}"


def loop_s() -> float:
    """What this machine takes for work that is always the same."""
    begun, found = time.thread_time(), dict.fromkeys(range(1024), 0)
    for at in range(100_000):
        found[at & 1023] = found.get(at & 1023, 0) + at
    return time.thread_time() - begun


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Those would be of all that the tests of this process hold."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("mode", MODES.names())
def test_an_event_takes_50_us_at_most_with_10_000_workers(mode: str) -> None:
    """Means, as one event replies all where a round closes; of rounds the best, the machine being busy."""
    alone, loops = Alone(mode, VERY_MANY), [loop_s()]
    found = {"an event of a join": mean(alone.join()) / NUM_OF_JOIN}
    rounds = []
    for _ in range(3):
        rounds.append(mean(alone.round()))
        loops.append(loop_s())
    found |= {"a contribution": min(rounds), "a tick": mean(alone.tick()), "a finish": mean(alone.finish())}
    most_s = MOST_S * max(1.0, min(loops) / LOOP_S)
    assert max(found.values()) < most_s, {name: f"{seconds * 1e6:.1f} us" for name, seconds in found.items()}


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
