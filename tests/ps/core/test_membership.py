"""One live seat a rank, incarnations that only grow, and older processes that stay out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramserver.common.errors import ParamServerError, Reason
from paramserver.ps.core.events import Joined
from paramserver.ps.core.roster import Roster, Worker, replaced


def refused(call) -> ParamServerError:
    with pytest.raises(ParamServerError) as caught:
        call()
    return caught.value


def roster_of(num_workers: int | None) -> Roster:
    return Roster(num_workers, limit=100, lease_s=5.0)


def join(roster: Roster, rank: int | None, previous: int) -> tuple[Worker, Worker | None]:
    return roster.seat(Joined(1, rank, run="this" if previous else "", incarnation=previous))


class MembershipMachine(RuleBasedStateMachine):
    """Processes join with and without a rank, return after a lost connection, and leave, also long after."""

    @initialize(num_workers=st.none() | st.integers(1, 4))
    def start(self, num_workers: int | None) -> None:
        self.roster = roster_of(num_workers)
        self.seats: list[Worker] = []  # all ever given
        self.live: dict[int, Worker] = {}

    def _seated(self, seat: Worker, old: Worker | None, rank: int) -> None:
        assert seat.rank == rank
        assert old is self.live.get(rank)
        earlier = [seat.incarnation for seat in self.seats if seat.rank == rank]
        assert seat.incarnation == len(earlier) + 1 > max(earlier, default=0)
        self.seats.append(seat)
        self.live[rank] = seat

    @rule(rank=st.integers(0, 5))
    def a_process_joins_as(self, rank: int) -> None:
        limit = self.roster.num_workers
        if limit is not None and rank >= limit:
            error = refused(lambda: join(self.roster, rank, 0))
            assert error.reason is Reason.RANK_OUT_OF_RANGE
            assert f"ranks 0 to {limit - 1}" in error.message
        else:
            self._seated(*join(self.roster, rank, 0), rank)

    @rule()
    def a_process_joins_anywhere(self) -> None:
        limit = self.roster.num_workers
        free = [rank for rank in range(50) if rank not in self.live and (limit is None or rank < limit)]
        if free:
            self._seated(*join(self.roster, None, 0), free[0])
        else:
            error = refused(lambda: join(self.roster, None, 0))
            assert error.reason is Reason.RUN_FULL
            assert f"all {limit} ranks" in error.message

    @precondition(lambda self: self.seats)
    @rule(pick=st.integers(0, 100))
    def a_process_returns(self, pick: int) -> None:
        """Only the newest process of a rank may; an older one is told so, and takes nobody's place."""
        seat = self.seats[pick % len(self.seats)]
        if seat.incarnation == self.roster.num_joins[seat.rank]:
            self._seated(*join(self.roster, seat.rank, seat.incarnation), seat.rank)
        else:
            error = refused(lambda: join(self.roster, seat.rank, seat.incarnation))
            assert error.reason is Reason.REPLACED
            assert f"rank {seat.rank}" in error.message

    @precondition(lambda self: self.seats)
    @rule(pick=st.integers(0, 100))
    def a_process_leaves(self, pick: int) -> None:
        seat = self.seats[pick % len(self.seats)]
        if self.live.get(seat.rank) is seat:
            del self.live[seat.rank]
        self.roster.remove(seat)
        assert self.roster.workers == self.live, "nobody else leaves"
        self.roster.remove(seat)
        assert self.roster.workers == self.live, "nobody leaves twice"

    @rule(rank=st.integers(0, 3), incarnation=st.integers(50, 60))
    def a_process_claims_an_incarnation_that_never_was(self, rank: int, incarnation: int) -> None:
        limit = self.roster.num_workers
        if limit is None or rank < limit:
            assert refused(lambda: join(self.roster, rank, incarnation)).reason is Reason.REPLACED
        self.roster.remove(Worker(rank, incarnation))
        assert self.roster.workers == self.live

    @invariant()
    def exactly_the_live_seats_are_current(self) -> None:
        assert self.roster.workers == self.live


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_refusals_say_what_to_do() -> None:
    error = refused(lambda: join(roster_of(2), 5, 0))
    assert error.message == "no rank 5: the run has 2 workers, ranks 0 to 1"
    assert error.fix == "use --rank 0 to 1, or start ps-server with --workers 6 or more"
    assert "incarnation 3" in str(replaced(0, 3))


def test_a_process_that_had_not_begun_joins_another_run_but_not_again_once_it_was_replaced() -> None:
    roster = roster_of(2)
    assert roster.seat(Joined(1, 0, incarnation=3, process="old"))[0].incarnation == 1
    roster.seat(Joined(2, 0, process="new"))
    assert refused(lambda: roster.seat(Joined(3, 0, incarnation=1, process="old"))).reason is Reason.REPLACED
    roster.restore({0: 5})  # a relay went back to the state above, which knows of other processes of the rank
    assert roster.seat(Joined(4, 0, incarnation=2, process="new"))[0].incarnation == 6
    assert refused(lambda: roster.seat(Joined(5, 0, incarnation=1, process="old"))).reason is Reason.REPLACED
