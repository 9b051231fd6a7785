"""The order in which a round is folded: the same whatever the order of arrival, where the set of workers is fixed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.policies.base import Commit, Fold, Reply
from paramserver.tests.contract.policies import ALL_MODES, make_policy

from ..records import contribution_of, joined

ROUND_MODES = [mode for mode in ALL_MODES if getattr(make_policy(mode), "has_fixed_set", False)]


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("options", [{"straggler_timeout_s": 1.0}, {"straggler_mad": 3.0}, {"backup_workers": 1}])
def test_without_a_fixed_set_nobody_waits_for_a_stragglers_upload(mode: str, options: dict[str, Any]) -> None:
    policy = joined(mode, 3, **options)
    for rank in (2, 1):
        assert policy.upload_position(rank) == 0
        assert Fold(rank, 1.0) in policy.contributed(rank, contribution_of(1, 0), 0.0)


@pytest.mark.parametrize("mode", ROUND_MODES)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_version_is_folded_in_rank_order_whoever_leaves_and_returns(mode: str, data: st.DataObject) -> None:
    """At any time, before or after the others contributed: a version depends only on the contributions in it."""
    num_workers = data.draw(st.integers(2, 5))
    options = data.draw(st.sampled_from([{}, {"min_workers": num_workers}]))
    options |= data.draw(st.sampled_from([{}, {"max_staged": num_workers}]))
    policy = make_policy(mode, num_workers=num_workers, **options)
    folded: list[int] = []
    ready: set[int] = set()
    versions = 0

    def carry_out(decisions: list[Any]) -> None:
        nonlocal versions
        for decision in decisions:
            if isinstance(decision, Fold):
                folded.append(decision.rank)
            elif isinstance(decision, Reply):
                ready.add(decision.rank)
            elif isinstance(decision, Commit):
                assert folded == sorted(folded) == list(decision.ranks)
                assert len(folded) >= options.get("min_workers", 1)
                folded.clear()
                versions += 1

    for rank in range(num_workers):
        carry_out(policy.joined(rank, 0.0))
    for _ in range(data.draw(st.integers(5, 40))):
        actions = [("contribute", rank) for rank in sorted(ready)]
        live = set(policy.members)
        # One is away at a time.
        actions += [("leave", rank) for rank in sorted(live)] if len(live) == num_workers else []
        actions += [("join", rank) for rank in range(num_workers) if rank not in live]
        action, rank = data.draw(st.sampled_from(actions))
        if action == "contribute":
            ready.remove(rank)
            carry_out(policy.contributed(rank, contribution_of(policy.seq(rank) + 1, policy.version), 0.0))
        elif action == "leave":
            ready.discard(rank)
            carry_out(policy.left(rank, 0.0))
        else:
            carry_out(policy.joined(rank, 0.0))
        assert policy.version == versions


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_a_round_that_has_lost_too_many_takes_in_who_came_late(mode: str) -> None:
    """With `min_workers` of 2: rank 0 starts with the next round, until rank 2 dies. Then both would wait for ever."""
    policy = joined(mode, 3, min_workers=2)
    policy.left(0, 0.0)
    for rank in (1, 2):
        policy.contributed(rank, contribution_of(1, 0), 0.0)
    policy.contributed(1, contribution_of(2, 1), 0.0)
    policy.joined(0, 0.0)
    assert [decision.rank for decision in policy.left(2, 0.0)] == [0]  # its START
    assert policy.contributed(0, contribution_of(1, 1), 0.0)[0] == Fold(0, 1.0)
    assert policy.version == 2


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_a_place_is_kept_free_only_while_nobody_needs_the_memory(mode: str) -> None:
    """Two uploads fit: rank 1's waits behind rank 0's place until rank 2 asks for memory, which only this one has."""
    policy = joined(mode, 4, max_staged=2)
    assert policy.left(0, 0.0) == []
    assert [policy.upload_position(rank) for rank in (1, 2, 3)] == [1, 2, 3]
    assert policy.contributed(1, contribution_of(1, 0), 0.0) == [Fold(1, 1.0)]
    assert [policy.upload_position(rank) for rank in (2, 3)] == [0, 1]


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_a_process_that_replaces_a_live_one_starts_at_once_however_little_memory_there_is(mode: str) -> None:
    """An upload of rank 1 may have all of it: then neither waits for the other."""
    policy = joined(mode, 2, max_staged=1)
    assert [type(decision) for decision in policy.joined(0, 0.0)] == [Reply]
    assert [policy.upload_position(rank) for rank in range(2)] == [0, 0]
    assert policy.contributed(1, contribution_of(1, 0), 0.0) == [Fold(1, 1.0)]
    assert policy.contributed(0, contribution_of(1, 0), 0.0)[0] == Fold(0, 1.0)
