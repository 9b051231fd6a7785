"""Who holds which rank, and for how long in silence: ranks, incarnations, fencing, leases; nothing of connections.

A rank is a worker's stable name; an incarnation is a number that grows with every join of a
rank. The newest incarnation is the rank: an older process that still speaks is fenced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...common.errors import ParamServerError, Reason, refusal

# More joins of one rank than this between two snapshots are not believed.
_MAX_UNKNOWN_JOINS = 10_000


@dataclass(frozen=True)
class Seat:
    """One rank as held by one process."""

    rank: int
    incarnation: int


class Membership:
    """Ranks 0..num_workers-1, or any rank when `num_workers` is None."""

    def __init__(self, num_workers: int | None) -> None:
        self.num_workers = num_workers
        self.num_joins: dict[int, int] = {}  # per rank; the incarnation of its newest process
        self._live: dict[int, Seat] = {}
        self._processes: dict[int, str] = {}  # of each rank's newest join
        self._unknown_joins = 0  # that a rank may have had and that are not known here

    def restore(self, num_joins: Mapping[int, int]) -> None:
        """Go on from a snapshot: what joined after it was taken is known to the workers alone."""
        self.num_joins = dict(num_joins)
        self._unknown_joins = _MAX_UNKNOWN_JOINS

    def join(self, rank: int | None, previous: int, process: str = "") -> tuple[Seat, Seat | None]:
        """Seat a process; also returns the seat it takes from an older process, if any.

        `rank` None takes the lowest free one. `previous` is the incarnation this same process
        had before a lost connection, 0 on its first join; it may be higher than any known here
        after a server went back to a snapshot. `process` names the process, which may not have
        heard of the incarnation it was given last. Refuses RANK_OUT_OF_RANGE, RUN_FULL, and
        REPLACED when a newer process holds the rank.
        """
        if rank is None:
            rank = self._free_rank()
        if self.num_workers is not None and rank >= self.num_workers:
            raise refusal(
                Reason.RANK_OUT_OF_RANGE,
                f"no rank {rank}: the run has {self.num_workers} workers, ranks 0 to {self.num_workers - 1}",
                fix=f"use --rank 0 to {self.num_workers - 1}, or start ps-server with --workers {rank + 1} or more",
            )
        newest = self.num_joins.get(rank, 0)
        if newest < previous <= newest + self._unknown_joins:
            newest = previous
        known = self._processes.get(rank, "")
        is_newest = process == known if process and known else previous == newest
        if previous and not is_newest:
            raise replaced(rank, previous)
        replaced_seat = self._live.get(rank)
        seat = Seat(rank, newest + 1)
        self.num_joins[rank] = seat.incarnation
        self._processes[rank] = process
        self._live[rank] = seat
        return seat, replaced_seat

    def leave(self, seat: Seat) -> bool:
        """Free the rank; False when a newer process holds it already."""
        if self._live.get(seat.rank) != seat:
            return False
        del self._live[seat.rank]
        return True

    def is_current(self, seat: Seat) -> bool:
        """True while this seat's process is the one that holds the rank."""
        return self._live.get(seat.rank) == seat

    @property
    def live_ranks(self) -> list[int]:
        return sorted(self._live)

    def _free_rank(self) -> int:
        rank = 0
        while rank in self._live:
            rank += 1
        if self.num_workers is not None and rank >= self.num_workers:
            raise refusal(
                Reason.RUN_FULL,
                f"all {self.num_workers} ranks of the run are taken",
                fix=f"start ps-server with --workers {self.num_workers + 1} or more",
            )
        return rank


def replaced(rank: int, incarnation: int) -> ParamServerError:
    """The refusal an older process of a rank gets."""
    return refusal(
        Reason.REPLACED,
        f"another process joined as rank {rank} (this one was incarnation {incarnation}): only the newest may go on",
        fix="give every worker its own --rank",
    )


# Leases are looked at five times a second; a longer pause than this means that this process stood still.
_STANDSTILL_S = 1.0


class Leases:
    """Who has not been heard of for too long; `now` is monotonic seconds. Who has said no first word has no deadline.

    A worker's signs of life are its heartbeats and its contributions. The time in which this process was
    frozen itself does not count: nobody could be heard then.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard: dict[int, float] = {}
        self._looked_at: float | None = None

    def renew(self, rank: int, now: float) -> None:
        """A sign of life."""
        self._heard[rank] = now

    def has(self, rank: int) -> bool:
        """Whether the rank has said a first word."""
        return rank in self._heard

    def forget(self, rank: int) -> None:
        """The rank has left."""
        self._heard.pop(rank, None)

    def look(self, now: float) -> list[int]:
        """Ranks whose lease has ended; call it every fraction of a second."""
        if self._looked_at is not None and now - self._looked_at > _STANDSTILL_S:
            for rank in self._heard:
                self._heard[rank] = now
        self._looked_at = now
        return sorted(rank for rank, heard in self._heard.items() if now - heard > self.lease_s)

    def silent_s(self, rank: int, now: float) -> float:
        """Seconds since the rank's last sign of life."""
        return now - self._heard.get(rank, now)
