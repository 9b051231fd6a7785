"""Which fault when to whom: the same for the same seed, and of the kinds that were asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import UsageError
from paramserver.drills.chaos.faults import Injector
from paramserver.drills.chaos.plan import KINDS, check_kinds, make_plan

SEEDS = st.integers(0, 2**31)


@settings(max_examples=50, deadline=None)
@given(
    seed=SEEDS,
    seconds=st.floats(1, 300),
    num_workers=st.integers(1, 9),
    lease_s=st.floats(0.5, 10),
    kinds=st.sets(st.sampled_from(KINDS), min_size=1),
)
def test_a_plan_keeps_to_what_was_asked_for(
    seed: int, seconds: float, num_workers: int, lease_s: float, kinds: set[str]
) -> None:
    plan = make_plan(seed, seconds=seconds, num_workers=num_workers, lease_s=lease_s, kinds=kinds)
    assert plan == make_plan(seed, seconds=seconds, num_workers=num_workers, lease_s=lease_s, kinds=sorted(kinds))
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    for fault in plan:
        assert fault.kind in kinds
        assert 0 <= fault.at_s < seconds
        assert fault.rank is None or 0 <= fault.rank < num_workers
        if "worker" in fault.kind:
            assert fault.rank is not None
        if "server" in fault.kind:
            assert fault.rank is None
        if fault.kind in ("freeze_worker", "freeze_server", "partition"):  # whether the lease ends is no matter of luck
            assert not 0.65 < fault.for_s / lease_s < 1.25


def test_another_seed_is_another_plan() -> None:
    plans = {tuple(make_plan(seed, seconds=60, num_workers=4, lease_s=2)) for seed in range(20)}
    assert len(plans) == 20


@pytest.mark.parametrize("seed", range(20))
def test_a_minute_has_every_kind_and_both_sides_of_the_lease(seed: int) -> None:
    plan = make_plan(seed, seconds=60, num_workers=4, lease_s=2)
    counts = Counter(fault.kind for fault in plan)
    assert set(counts) == set(KINDS)
    assert counts["kill_server"] >= 2
    assert counts["kill_worker"] >= 2


def test_a_fault_is_one_line() -> None:
    plan = make_plan(0, seconds=60, num_workers=4, lease_s=2, kinds=["partition", "kill_server"])
    texts = [str(fault) for fault in plan]
    assert "kill_server" in texts
    assert any(text.startswith("partition for ") for text in texts)
    assert any(text.startswith("partition worker ") for text in texts)


def test_every_kind_can_be_injected() -> None:
    assert [kind for kind in KINDS if not callable(getattr(Injector, f"_{kind}", None))] == []


def test_an_unknown_fault_is_named() -> None:
    assert check_kinds(None) == KINDS
    assert check_kinds("cut, reset") == ("cut", "reset")
    with pytest.raises(UsageError, match="no fault 'kill_servr'") as caught:
        check_kinds("kill_servr")
    assert caught.value.fix == "did you mean 'kill_server'?"
