"""What a policy saves is what it needs: one that goes on from a snapshot decides as the saved one would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Policy
from paramserver.tests.contract.policies import ALL_MODES, World, mode_settings


class Twins:
    """Two policies that are given the same events and must decide the same."""

    def __init__(self, first: Policy, second: Policy) -> None:
        self._first, self._second = first, second

    def __getattr__(self, name: str) -> Any:
        of_first = getattr(self._first, name)
        if name not in ("joined", "left", "contributed", "rejected", "tick"):
            return of_first

        def both(*arguments: Any) -> Any:
            decided = of_first(*arguments)
            assert getattr(self._second, name)(*arguments) == decided
            return decided

        return both


def play_on(world: World, data: st.DataObject, ranks: Sequence[int] = range(3)) -> None:
    """Workers of these ranks contribute, go and come back, in any order."""
    for _ in range(data.draw(st.integers(0, 25))):
        live = sorted(world.store.live)
        actions = [("contribute", rank) for rank in live if world.store.live[rank].state == "computing"]
        actions += [("reject", rank) for _, rank in actions] + [("leave", rank) for rank in live]
        actions += [("join", rank) for rank in ranks if rank not in live]
        if not actions:
            return
        action, rank = data.draw(st.sampled_from(actions))
        world.now += data.draw(st.sampled_from([0.0, 1.0, 3.0]))
        getattr(world, action)(rank)


@pytest.mark.parametrize("mode", ALL_MODES)
@given(options=mode_settings(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_restored_policy_decides_as_the_saved_one_would(mode: str, options: dict[str, Any], data: Any) -> None:
    world = World(mode, {**options, "training_steps": 1000, "num_workers": None})
    play_on(world, data)
    world.settle_everything()  # what is in no version is not saved
    saved = world.policy
    state = json.loads(json.dumps(saved.saved_state()))
    restored = policy_of(mode, world.settings)
    restored.restore(saved.version, saved.committed, state)
    assert restored.saved_state() == saved.saved_state()
    for rank in sorted(world.store.live):
        world.leave(rank)
    for rank in sorted(world.last_seqs):
        world.join(rank)
        restored.joined(rank, world.now)
    world.says_generations = False  # those of one that goes on are others
    world.policy = Twins(saved, restored)  # type: ignore[assignment]
    # A rank that is new while nobody is live begins at 0 in a run, and at the others' in one that goes on.
    play_on(world, data, sorted(world.last_seqs))
