"""Leases: who is let go, and when; and who has come anew. Pure, so time is a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserver.ps.core.events import Joined
from paramserver.ps.core.roster import Roster

TICK_S = 0.2


def roster_of(*ranks: int, lease_s: float) -> Roster:
    """Workers with these ranks are here; each one's process is named as its rank."""
    roster = Roster(None, limit=10, lease_s=lease_s)
    for rank in ranks:
        roster.seat(Joined(1, rank, process=str(rank)))
    return roster


def heartbeat(roster: Roster, rank: int, now: float) -> None:
    roster.heartbeat(rank, str(rank), now)


def silent(roster: Roster, now: float) -> list[int]:
    return [worker.rank for worker, _ in roster.silent(now)]


def looked(roster: Roster, start: float, end: float) -> list[int]:
    """Look five times a second from `start` to `end`; who had been silent for too long at any of them."""
    found: set[int] = set()
    for tick in range(round((end - start) / TICK_S) + 1):
        found.update(silent(roster, start + tick * TICK_S))
    return sorted(found)


def test_who_never_said_a_word_has_no_lease() -> None:
    roster = roster_of(0, lease_s=1.0)
    assert looked(roster, 0.0, 100.0) == []


def test_another_process_has_a_lease_of_its_own() -> None:
    """Not that of the process whose rank it takes, and nothing that one says is for it."""
    roster = roster_of(0, lease_s=1.0)
    heartbeat(roster, 0, 0.0)
    roster.seat(Joined(2, 0, process="another"))
    heartbeat(roster, 0, 0.2)
    assert looked(roster, 0.2, 100.0) == []


@given(st.floats(1.1, 100.0), st.floats(0.2, 3.0), st.floats(1.0, 10.0))
def test_a_process_that_stands_still_again_and_again_misses_who_is_dead(
    stall_s: float, between_s: float, lease_s: float
) -> None:
    """Rank 0 is dead, rank 1 heartbeats whenever this process runs. Between two stalls it looks every tick."""
    roster, now, ran_s = roster_of(0, 1, lease_s=lease_s), 0.0, 0.0
    heartbeat(roster, 0, now)
    heartbeat(roster, 1, now)
    silent(roster, now)
    found: list[int] = []
    while not found and ran_s < lease_s + between_s + 2 * TICK_S:
        now += stall_s + TICK_S  # this tick comes late
        ran_s += TICK_S
        found = silent(roster, now)
        for _ in range(round((between_s - TICK_S) / TICK_S)):
            heartbeat(roster, 1, now)
            now += TICK_S
            ran_s += TICK_S
            found = found or silent(roster, now)
        heartbeat(roster, 1, now)
    assert found == [0], f"after {ran_s} s, of which this process ran, with a lease of {lease_s} s"
    assert ran_s > lease_s - 1e-6


@given(lease_s=st.floats(1.0, 10.0), parts=st.lists(st.floats(0.05, 0.9), min_size=1, max_size=20))
def test_nobody_who_heartbeats_in_time_is_let_go(lease_s: float, parts: list[float]) -> None:
    roster, now = roster_of(7, lease_s=lease_s), 0.0
    heartbeat(roster, 7, now)
    for part in parts:
        assert looked(roster, now, now + part * lease_s - TICK_S) == []
        now += part * lease_s
        heartbeat(roster, 7, now)
    assert looked(roster, now, now + lease_s + 2 * TICK_S) == [7]


def test_a_process_that_joins_again_is_no_restart_and_a_new_one_is() -> None:
    roster = roster_of(0, lease_s=5.0)
    roster.seat(Joined(2, 0, process="0", incarnation=1))
    assert roster.stats[0].num_joins == 1
    roster.seat(Joined(3, 0, process="another"))
    assert roster.stats[0].num_joins == 2
