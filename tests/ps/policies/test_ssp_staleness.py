"""ssp bounds version staleness by (2s + 1)(N - 1): by simulation of arbitrary speeds, and reached exactly.

Between two contributions of one worker each other one makes at most 2s + 1: it may begin s behind
and end s + 1 ahead. DelayedUpdate it is 2s(N - 1) + 1 (see ssp.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.policies.base import Policy, Reply

from ...records import contribution_of, joined


@dataclass
class Worker:
    """Versions of weights. With delayed_update it computes while its last contribution is on its way."""

    computes_on: int = 0
    in_flight: int | None = None  # base of the contribution handed over, which has not come in
    received: int | None = None  # weights that have come since, with delayed_update
    is_replied: bool = True


@dataclass
class Simulation:
    """N workers under ssp. When a contribution comes in, and when a step is done, is the caller's choice."""

    policy: Policy
    workers: dict[int, Worker]
    max_ahead: int = 0  # of the slowest, when a delayed step is started; contributions in flight count
    max_staleness: int = 0

    @classmethod
    def of(cls, num_workers: int, staleness: int, delayed_update: bool = False) -> Simulation:
        policy = joined("ssp", num_workers, staleness=staleness, delayed_update=delayed_update)
        assert policy.waiting(0.0) == {}
        return cls(policy, {rank: Worker() for rank in range(num_workers)})

    def hand_over(self, rank: int) -> None:
        """A step is done and the last exchange too: with delayed_update the next step starts at once."""
        worker = self.workers[rank]
        assert worker.is_replied
        worker.in_flight, worker.is_replied = worker.computes_on, False
        if worker.received is not None:
            worker.computes_on, worker.received = worker.received, None
        self.max_ahead = max(self.max_ahead, self.policy.lead(rank) + 1)

    def come_in(self, rank: int) -> int:
        """The contribution in flight is applied; its staleness: the version it is applied to minus its base."""
        base = self.workers[rank].in_flight
        assert base is not None
        self.workers[rank].in_flight = None
        staleness = self.policy.version - base
        self.max_staleness = max(self.max_staleness, staleness)
        for decision in self.policy.contributed(rank, contribution_of(self.policy.seq(rank) + 1, base), 0.0):
            if isinstance(decision, Reply):
                assert self.policy.lead(decision.rank) <= self.policy.staleness_bound
                replied = self.workers[decision.rank]
                replied.is_replied = True
                if self.policy.common.delayed_update:
                    replied.received = self.policy.version
                else:
                    replied.computes_on = self.policy.version
        return staleness

    def contribute(self, rank: int) -> int:
        self.hand_over(rank)
        return self.come_in(rank)

    def replied(self) -> set[int]:
        return {rank for rank, worker in self.workers.items() if worker.is_replied}

    def possible(self) -> list[tuple[str, int]]:
        moves = [("hand_over", rank) for rank in sorted(self.replied())]
        return moves + [("come_in", rank) for rank, worker in self.workers.items() if worker.in_flight is not None]


def bound_of(num_workers: int, staleness: int) -> int:
    return (2 * staleness + 1) * (num_workers - 1)


def delayed_bound_of(num_workers: int, staleness: int) -> int:
    return 2 * staleness * (num_workers - 1) + 1


@pytest.mark.parametrize("delayed_update", [False, True])
@given(
    num_workers=st.integers(1, 6),
    staleness=st.integers(0, 4),
    favourite=st.integers(0, 5),
    choices=st.lists(st.integers(0, 1000), max_size=250),
)
@settings(max_examples=300, deadline=None)
def test_any_order_of_contributions_stays_within_the_bounds(
    delayed_update: bool, num_workers: int, staleness: int, favourite: int, choices: list[int]
) -> None:
    staleness = max(staleness, int(delayed_update))
    simulation = Simulation.of(num_workers, staleness, delayed_update)
    for choice in choices:
        possible = simulation.possible()
        assert possible, "everybody waits"
        # One worker is left behind where there is a choice: stragglers make staleness.
        others = [move for move in possible if move[1] != favourite] if choice % 5 else []
        move, rank = (others or possible)[choice // 5 % len(others or possible)]
        getattr(simulation, move)(rank)
        assert all(simulation.policy.lead(rank) <= staleness + (not delayed_update) for rank in range(num_workers))
        if delayed_update:
            assert simulation.max_ahead <= staleness
            assert simulation.max_staleness <= delayed_bound_of(num_workers, staleness)
        else:
            assert simulation.max_staleness <= bound_of(num_workers, staleness)


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_is_reached(num_workers: int, staleness: int) -> None:
    """s = 0 is not sync SGD: one worker's gradient is N - 1 versions old."""
    simulation = Simulation.of(num_workers, staleness)
    # Rank 0 runs ahead as far as it may start a step; the others are s behind it, then s + 1 ahead.
    for _ in range(staleness):
        simulation.contribute(0)
    others = range(1, num_workers)
    for _ in range(2 * staleness + 1):
        for rank in others:
            simulation.contribute(rank)
    assert not set(others) & simulation.replied(), "the others could go on without rank 0"
    assert simulation.contribute(0) == bound_of(num_workers, staleness)
    assert simulation.replied() == set(range(num_workers))


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_the_delayed_update_bounds_are_reached(num_workers: int, staleness: int) -> None:
    simulation = Simulation.of(num_workers, staleness, delayed_update=True)
    # Rank 0 computes step s + 1 on weights it got when it was s - 1 ahead, with step s on its way.
    for _ in range(staleness - 1):
        simulation.contribute(0)
    simulation.hand_over(0)
    assert simulation.max_ahead == staleness
    simulation.come_in(0)
    # Until it contributes that step, each of the others makes 2 s contributions, and no more.
    for _ in range(2 * staleness):
        for rank in range(1, num_workers):
            simulation.contribute(rank)
    assert not simulation.replied() & set(range(1, num_workers))
    assert simulation.contribute(0) == delayed_bound_of(num_workers, staleness)
    assert simulation.max_ahead == staleness
