"""The order in which a round is folded: the same whatever the order of arrival, where the set of workers is fixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.ps.policies.base import Commit, Contribution, Fold
from paramserver.tests.contract.policies import ALL_MODES, make_policy

ROUND_MODES = [mode for mode in ALL_MODES if getattr(make_policy(mode), "has_fixed_set", False)]


@dataclass
class Round:
    """What one round of a mode with a fixed set of workers decides."""

    folds: list[Fold] = field(default_factory=list)
    commits: list[tuple[int, ...]] = field(default_factory=list)


def play_rounds(mode: str, arrivals: list[list[int]], num_samples: dict[int, int], order: list[int]) -> list[Round]:
    policy = make_policy(mode, num_workers=len(order))
    for rank in order:
        policy.joined(rank, 0.0)
    rounds = []
    for step, arrival in enumerate(arrivals, 1):
        decided = Round()
        for rank in arrival:
            for decision in policy.contributed(rank, Contribution(step, policy.version, num_samples[rank]), 0.0):
                if isinstance(decision, Fold):
                    decided.folds.append(decision)
                elif isinstance(decision, Commit):
                    decided.commits.append(decision.ranks)
        rounds.append(decided)
    return rounds


@pytest.mark.parametrize("mode", ROUND_MODES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_fold_order_does_not_depend_on_arrival(mode: str, data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, 7))
    ranks = list(range(num_workers))
    num_samples = {rank: data.draw(st.integers(1, 50)) for rank in ranks}
    arrivals = [data.draw(st.permutations(ranks)) for _ in range(3)]
    rounds = play_rounds(mode, arrivals, num_samples, data.draw(st.permutations(ranks)))
    expected = [Fold(rank, float(num_samples[rank])) for rank in ranks]
    assert [decided.folds for decided in rounds] == [expected] * 3
    assert [decided.commits for decided in rounds] == [[tuple(ranks)]] * 3


@pytest.mark.parametrize("mode", ROUND_MODES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_fold_order_survives_departures(mode: str, data: st.DataObject) -> None:
    """Who leaves before contributing changes who is folded, not the order of the others."""
    num_workers = data.draw(st.integers(2, 7))
    ranks = list(range(num_workers))
    gone = set(data.draw(st.lists(st.sampled_from(ranks), max_size=num_workers - 1, unique=True)))
    policy = make_policy(mode, num_workers=num_workers)
    for rank in ranks:
        policy.joined(rank, 0.0)
    folded = []
    for rank in data.draw(st.permutations(ranks)):
        decisions = policy.left(rank, 0.0) if rank in gone else policy.contributed(rank, Contribution(1, 0), 0.0)
        folded += [decision.rank for decision in decisions if isinstance(decision, Fold)]
    assert folded == [rank for rank in ranks if rank not in gone]
    assert policy.version == 1


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_what_waited_behind_a_departed_worker_is_folded_at_once(mode: str) -> None:
    """Its memory is needed by others; the round itself stays open for rank 3."""
    policy = make_policy(mode, num_workers=4)
    for rank in range(4):
        policy.joined(rank, 0.0)
    for rank in (1, 2):
        assert policy.contributed(rank, Contribution(1, 0), 0.0) == []
    assert policy.left(0, 0.0) == [Fold(1, 1.0), Fold(2, 1.0)]


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("options", [{"straggler_timeout_s": 1.0}, {"straggler_mad": 3.0}, {"backup_workers": 1}])
def test_without_a_fixed_set_nobody_waits_for_a_stragglers_upload(mode: str, options: dict[str, Any]) -> None:
    policy = make_policy(mode, num_workers=3, **options)
    for rank in range(3):
        policy.joined(rank, 0.0)
    for rank in (2, 1):
        assert policy.upload_position(rank) == 0
        assert Fold(rank, 1.0) in policy.contributed(rank, Contribution(1, 0), 0.0)
