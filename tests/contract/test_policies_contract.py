"""Every mode keeps the promises of ps/policies/base.py, whatever happens in whatever order.

Hypothesis looks for an order of events that makes something happen which must never (`policies.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from paramserver.common.registry import MODES
from paramserver.tests.contract.policies import ALL_MODES, MAX_RANK, World, mode_settings

# Without the phase that explains a failure: it traces every line.
SETTINGS = settings(stateful_step_count=40, deadline=None, phases=(Phase.reuse, Phase.generate, Phase.shrink))


class PolicyMachine(RuleBasedStateMachine):
    """Events in any order; the choice of a rank is a number, taken modulo those that apply."""

    mode: str

    @initialize(settings=mode_settings(), delayed_update=st.booleans())
    def start(self, settings: dict[str, Any], delayed_update: bool) -> None:
        kind = MODES.load(self.mode)
        may = kind.may_delay_update and settings["staleness"] >= kind.staleness_in_flight
        self.world = World(self.mode, {**settings, "delayed_update": delayed_update and may})
        self.last_rank = (settings["num_workers"] or MAX_RANK) - 1

    def ranks(self, *states: str) -> list[int]:
        return [rank for rank, worker in self.world.store.live.items() if worker.state in states]

    def absent(self) -> list[int]:
        return [rank for rank in range(self.last_rank + 1) if rank not in self.world.store.live]

    @precondition(lambda self: self.absent())
    @rule(pick=st.integers(0, 20))
    def joins(self, pick: int) -> None:
        absent = self.absent()
        self.world.join(absent[pick % len(absent)])

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20), num_samples=st.integers(1, 9))
    def contributes(self, pick: int, num_samples: int) -> None:
        computing = self.ranks("computing")
        self.world.contribute(computing[pick % len(computing)], num_samples)

    @precondition(lambda self: self.ranks("computing") and self.world.policy.kind.has_peers)
    @rule(pick=st.integers(0, 20), is_broken=st.booleans())
    def reports(self, pick: int, is_broken: bool) -> None:
        computing = self.ranks("computing")
        self.world.contribute(computing[pick % len(computing)], is_broken=is_broken)

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20), ahead=st.integers(1, 3))
    def contributes_on_a_version_that_never_was(self, pick: int, ahead: int) -> None:
        computing = self.ranks("computing")
        version = self.world.policy.version + ahead
        self.world.contribute(computing[pick % len(computing)], base_version=version)

    @precondition(lambda self: self.world.store.live)
    @rule(pick=st.integers(0, 20))
    def leaves(self, pick: int) -> None:
        live = list(self.world.store.live)
        self.world.leave(live[pick % len(live)])

    @rule(rank=st.integers(0, 9))
    def leaves_again(self, rank: int) -> None:
        if rank not in self.world.store.live:
            self.world.leave(rank)

    @precondition(lambda self: self.ranks("computing", "waiting"))
    @rule(pick=st.integers(0, 20))
    def repeats(self, pick: int) -> None:
        ranks = [r for r in self.ranks("computing", "waiting") if self.world.policy.seq(r) > 0]
        if ranks:
            self.world.repeat(ranks[pick % len(ranks)])

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20), gap=st.sampled_from([-3, -1, 2, 1000]))
    def skips_a_step(self, pick: int, gap: int) -> None:
        computing = self.ranks("computing")
        rank = computing[pick % len(computing)]
        seq = self.world.policy.seq(rank) + gap
        if seq >= 1:
            self.world.refuse(rank, seq, "SEQ_GAP")
            self.world.leave(rank)  # a refused call ends

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20))
    def contributes_what_cannot_be_used(self, pick: int) -> None:
        computing = self.ranks("computing")
        self.world.reject(computing[pick % len(computing)])

    @precondition(lambda self: self.world.store.live)
    @rule(pick=st.integers(0, 20))
    def loses_its_connection(self, pick: int) -> None:
        live = list(self.world.store.live)
        self.world.disconnect(live[pick % len(live)])

    def owed(self) -> list[int]:
        """Ranks that lost their connection before they were replied."""
        return [rank for rank in self.ranks("waiting") if self.world.store.live[rank].is_away]

    @precondition(lambda self: self.owed())
    @rule(pick=st.integers(0, 20))
    def asks_again(self, pick: int) -> None:
        self.world.ask_again(self.owed()[pick % len(self.owed())])

    @precondition(lambda self: self.owed())
    @rule(pick=st.integers(0, 20))
    def goes_on_without_asking(self, pick: int) -> None:
        rank = self.owed()[pick % len(self.owed())]
        if not self.world.store.live[rank].counts_for_nothing:
            self.world.refuse(rank, self.world.policy.seq(rank) + 1, "SEQ_GAP")

    @rule(rank=st.integers(0, 9))
    def speaks_without_having_joined(self, rank: int) -> None:
        if rank not in self.world.store.live and rank not in self.world.store.staged:
            self.world.refuse(rank, self.world.policy.seq(rank) + 1, "NOT_JOINED")

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.9, 2.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.event("tick")

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.is_sound:
            self.world.settle_everything()
            self.world.replay()


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_any_order_of_events(mode: str, examples: int) -> None:
    machine = type(f"{mode}Machine", (PolicyMachine,), {"mode": mode})
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=examples))
