"""Who is here: seats, workers, their signs of life. Decides nothing about training.

    joins ──> connected ──goodbye──────────────────────────────> gone
                  │  ▲
    stream lost   │  │ the same process joins again
                  ▼  │
                away ──its heartbeat connection closes, or its lease ends──> gone

A process that dies closes all its connections at once, and is gone at once. One that loses only the
connection of its exchange is away, and comes back to where it was. A worker without heartbeats (any
client may do without) is gone when its stream ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...common.errors import Reason, refusal
from .events import Joined
from .membership import Leases, Membership, Seat
from .stats import WorkerStats


@dataclass(eq=False, slots=True)
class Worker:
    """One process that has a rank."""

    seat: Seat
    process: str = ""  # whose heartbeats count for it
    model: tuple[str, str] = ("", "")  # model and optimizer it has offered, on all shards
    is_resumed: bool = False  # goes on where it was: no START is due
    is_away: bool = False  # its stream is lost, its process is not; or it is on its way back
    is_finished: bool = False
    can_evaluate: bool = False
    waiting_since: float | None = None
    staleness: int = 0  # of its contribution that is not answered yet
    wants_weights: bool = True  # with the answer to it
    hyperparameters: tuple[dict[str, Any], ...] | None = None  # as it said last
    num_contributed: int = 0  # since this process began: how far its own schedules are

    @property
    def rank(self) -> int:
        return self.seat.rank

    @property
    def incarnation(self) -> int:
        return self.seat.incarnation

    @property
    def has_offered(self) -> bool:
        return bool(self.model[0])

    def goes_on_from(self, old: Worker) -> None:
        """The same process on a new stream."""
        self.is_resumed = self.is_away = True  # away until all shards know what it trains
        self.model, self.staleness, self.wants_weights = old.model, old.staleness, old.wants_weights
        self.hyperparameters, self.num_contributed = old.hyperparameters, old.num_contributed


class Roster:
    """All workers of a run, one per rank at most."""

    def __init__(self, num_workers: int | None, limit: int, lease_s: float) -> None:
        self.membership = Membership(num_workers)
        self.workers: dict[int, Worker] = {}
        self.stats: dict[int, WorkerStats] = {}
        self._leases = Leases(lease_s)
        self._hearts: Counter[str] = Counter()  # heartbeat streams that are open, by process
        self._limit = limit
        self.was_anyone_here = False

    def seat(self, asked: Joined) -> tuple[Worker, Worker | None]:
        """A place for a process, and the worker of an older process or stream that had it."""
        if asked.rank not in self.workers and len(self.workers) >= self._limit:
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"{len(self.workers)} workers are here, and this server takes {self._limit} (limits.workers)",
                fix="start ps-server with --workers N, or --set limits.workers=N",
            )
        seat, _ = self.membership.join(asked.rank, asked.incarnation, asked.process)
        old = self.workers.pop(seat.rank, None)
        self.was_anyone_here = True
        self._leases.forget(seat.rank)
        self.stats.setdefault(seat.rank, WorkerStats(seat.rank)).num_joins += 1
        worker = self.workers[seat.rank] = Worker(seat, process=asked.process)
        return worker, old

    def remove(self, worker: Worker) -> bool:
        """The worker is gone; False when its rank is another's already."""
        if not self.membership.leave(worker.seat):
            return False
        del self.workers[worker.rank]
        self._leases.forget(worker.rank)
        return True

    @property
    def live_ranks(self) -> list[int]:
        return self.membership.live_ranks

    def find(self, rank: int, incarnation: int) -> Worker | None:
        """The worker of this incarnation, while it holds the rank."""
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.incarnation == incarnation else None

    # ---- signs of life --------------------------------------------------------------------

    def heart_began(self, process: str) -> None:
        """A heartbeat stream is open."""
        self._hearts[process] += 1

    def heart_stopped(self, process: str) -> Worker | None:
        """A heartbeat stream has ended. Returns the worker that is gone with it."""
        self._hearts[process] -= 1
        if self._hearts[process] > 0:
            return None
        del self._hearts[process]
        return next((worker for worker in self.workers.values() if worker.process == process and worker.is_away), None)

    def has_heart(self, worker: Worker) -> bool:
        return bool(worker.process) and worker.process in self._hearts

    def heard(self, rank: int, process: str, now: float) -> None:
        """A heartbeat: from the first one on, the worker has a lease."""
        if self.is_member(rank, process):
            self._leases.renew(rank, now)

    def is_member(self, rank: int, process: str) -> bool:
        """Whether this process holds the rank."""
        worker = self.workers.get(rank)
        return worker is not None and bool(process) and worker.process == process

    def spoke(self, worker: Worker, now: float) -> None:
        """Something of its exchange came: as good as a heartbeat, for who has a lease."""
        if self._leases.has(worker.rank):
            self._leases.renew(worker.rank, now)

    def silent(self, now: float) -> list[tuple[Worker, float]]:
        """Workers whose lease has ended, with the seconds since they were heard."""
        return [(self.workers[rank], self._leases.silent_s(rank, now)) for rank in self._leases.look(now)]
