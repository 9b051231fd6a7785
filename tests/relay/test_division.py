"""The division of the data among the workers of all regions, whose numbers change. Pure."""

from __future__ import annotations

from paramserver.ps.core.events import Joined
from paramserver.ps.core.roster import Roster


def joined(rank: int, num_workers: int) -> Joined:
    return Joined(1, rank, "", 0, 0, f"process {rank}", num_workers)


def test_regions_come_one_after_another() -> None:
    roster = Roster(3, 3, 5.0)
    for rank, num_workers in enumerate((3, 1, 2)):
        roster.seat(joined(rank, num_workers))
    assert [roster.division(rank) for rank in range(3)] == [(6, 0), (6, 3), (6, 4)]


def test_a_region_that_shrinks_to_one_worker_has_one_share() -> None:
    roster = Roster(2, 2, 5.0)
    for rank in range(2):
        roster.seat(joined(rank, 3))
    roster.seat(joined(0, 1))
    assert [roster.division(rank) for rank in range(2)] == [(4, 0), (4, 1)]


def test_a_region_adds_the_workers_of_the_others() -> None:
    roster = Roster(None, 8, 5.0)
    for rank in range(2):
        roster.seat(joined(rank, 0))
    roster.num_before, roster.num_others = 3, 4
    assert [roster.division(rank) for rank in range(2)] == [(6, 3), (6, 4)]
