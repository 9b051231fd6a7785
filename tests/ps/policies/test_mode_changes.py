"""A run that goes on in another mode counts training steps: versions, rounds and contributions are each mode's own."""

from __future__ import annotations

import pytest

from paramserver.common.wire.records import Row
from paramserver.ps.core.run import Run
from paramserver.ps.core.state import Options
from paramserver.ps.engine.modes import policy_of

TOTAL, K, RANKS = 100, 8, range(4)
# After 48 training steps of each of four ranks: version, contributions of each.
AFTER = {"sync": (48, 48), "localsgd": (6, 6), "diloco": (6, 6), "async": (192, 48), "ssp": (192, 48)}
SETTINGS = {"training_steps": TOTAL, "num_workers": len(RANKS), "local_steps": K}


def saved_by(mode: str, contributions: dict[int, int], version: int) -> dict:
    """Each contribution has the mode's local steps."""
    local_steps = K if mode in ("localsgd", "diloco") else 1
    rows = {rank: Row(seq, seq * local_steps) for rank, seq in contributions.items()}
    run = Run(Options(mode), policy_of(mode, SETTINGS), "r")
    run.policy.restore(version, rows, {})
    return run.saved(0.0)


def restored(mode: str, saved: dict, version: int) -> Run:
    run = Run(Options(mode), policy_of(mode, SETTINGS), "r")
    run.restore(version, ("model", "sgd"), saved | {"policy": {}})
    return run


@pytest.mark.parametrize("then", AFTER)
@pytest.mark.parametrize("now", AFTER)
def test_as_many_are_done_and_left_in_every_mode(then, now):
    version, number = AFTER[then]
    policy = restored(now, saved_by(then, dict.fromkeys(RANKS, number), version), version).policy
    assert (policy.version, policy.seq(0)) == (version, number)  # these go on
    assert policy.min_steps_done == 48
    for rank in (*RANKS, 7):  # one that is new begins where the others are
        policy.joined(rank, 0.0)
        assert policy.steps_done(rank) == 48
        assert policy.next_local_steps(rank) == (K if now in ("localsgd", "diloco") else 1)
    assert policy.min_steps_done == 48


def test_rounds_go_on_from_the_slowest_and_others_from_where_each_was():
    contributions = {0: 30, 1: 20}
    saved = saved_by("async", contributions, 50)
    assert [restored("sync", saved, 50).policy.steps_done(rank) for rank in (0, 1)] == [20, 20]
    assert [restored("ssp", saved, 50).policy.steps_done(rank) for rank in (0, 1)] == [30, 20]


def test_who_has_ended_early_takes_nobody_back():
    saved = saved_by("async", {0: 50, 1: 20}, 70)
    saved["training"]["out"] = [1]
    assert restored("sync", saved, 70).policy.min_steps_done == 50
    policy = restored("async", saved, 70).policy
    policy.joined(0, 0.0)
    assert policy.min_steps_done == policy.steps_done(0) == 50


def test_it_may_change_again_and_again():
    version, saved = 48, saved_by("sync", dict.fromkeys(RANKS, 48), 48)
    for mode in ("localsgd", "async", "diloco", "localsgd", "sync", "ssp"):
        run = restored(mode, saved, version)
        assert run.policy.min_steps_done == 48
        saved = run.saved(0.0)
