"""Leases: who is let go, and when. Pure, so time is a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserver.ps.core.membership import Leases

TICK_S = 0.2


def looked(leases: Leases, start: float, end: float) -> list[int]:
    """Look five times a second from `start` to `end`; who had been silent for too long at any of them."""
    found: set[int] = set()
    for tick in range(round((end - start) / TICK_S) + 1):
        found.update(leases.look(start + tick * TICK_S))
    return sorted(found)


def test_who_is_silent_for_longer_than_the_lease_is_let_go() -> None:
    leases = Leases(5.0)
    leases.renew(0, 0.0)
    leases.renew(1, 0.0)
    assert looked(leases, 0.0, 4.0) == []
    leases.renew(1, 4.0)
    assert looked(leases, 4.2, 5.0) == []
    assert looked(leases, 5.2, 6.0) == [0]
    leases.forget(0)
    assert looked(leases, 6.2, 8.8) == []
    assert leases.silent_s(1, 9.5) == 5.5


def test_who_never_said_a_word_has_no_lease() -> None:
    leases = Leases(1.0)
    assert looked(leases, 0.0, 100.0) == []


def test_the_time_this_process_stood_still_does_not_count() -> None:
    leases = Leases(5.0)
    leases.renew(0, 0.0)
    leases.look(0.2)
    assert leases.look(60.0) == [], "nobody could be heard"
    assert looked(leases, 60.2, 64.8) == []
    assert looked(leases, 65.2, 66.0) == [0]


@given(lease_s=st.floats(1.0, 10.0), parts=st.lists(st.floats(0.05, 0.9), min_size=1, max_size=20))
def test_nobody_who_beats_in_time_is_let_go(lease_s: float, parts: list[float]) -> None:
    leases, now = Leases(lease_s), 0.0
    leases.renew(7, now)
    for part in parts:
        assert looked(leases, now, now + part * lease_s - TICK_S) == []
        now += part * lease_s
        leases.renew(7, now)
    assert looked(leases, now, now + lease_s + 2 * TICK_S) == [7]
