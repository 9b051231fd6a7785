"""Who is here: seats, connected workers, their signs of life. Decides nothing about training.

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

from ...common.errors import Reason, refusal
from ..wire.connected import Worker
from .leases import Leases
from .membership import Membership
from .stats import WorkerStats


@dataclass(frozen=True)
class Asked:
    """What a process says of itself when it joins (Join in the proto); zeros and empty: nothing."""

    rank: int | None = None
    run: str = ""
    incarnation: int = 0
    server_incarnation: int = 0
    process: str = ""
    is_seated: bool = False  # by the coordinator of several shards: rank and incarnation are what it gave
    resumes: bool = False  # as the coordinator said


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

    def seat(self, asked: Asked) -> tuple[Worker, Worker | None]:
        """A place for a process, and the worker of an older process or connection that had it."""
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
        stats = self.stats.setdefault(seat.rank, WorkerStats(seat.rank))
        stats.num_joins += 1
        stats.lane = "tcp"  # until it offers a segment
        worker = self.workers[seat.rank] = Worker(seat, stats, process=asked.process)
        return worker, old

    def place(self, worker: Worker) -> None:
        """A worker that another shard has seated has this rank now."""
        self.membership.place(worker.seat)
        self.workers[worker.rank] = worker
        self.was_anyone_here = True

    def remove(self, worker: Worker) -> bool:
        """The worker is gone; False when its rank is another's already."""
        if not self.membership.leave(worker.seat):
            return False
        del self.workers[worker.rank]
        self._leases.forget(worker.rank)
        return True

    def is_current(self, worker: Worker) -> bool:
        return self.membership.is_current(worker.seat)

    @property
    def live_ranks(self) -> list[int]:
        return self.membership.live_ranks

    def find(self, rank: int, incarnation: int) -> Worker | None:
        """The worker of this incarnation, while it is a member."""
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.seat.incarnation == incarnation else None

    # ---- signs of life --------------------------------------------------------------------

    def heart_began(self, process: str) -> None:
        self._hearts[process] += 1

    def heart_stopped(self, process: str) -> Worker | None:
        """A heartbeat stream has ended. Returns the worker that is gone with it."""
        self._hearts[process] -= 1
        if self._hearts[process]:
            return None
        del self._hearts[process]
        return next((worker for worker in self.workers.values() if worker.process == process and worker.is_away), None)

    def has_heart(self, worker: Worker) -> bool:
        return bool(worker.process) and worker.process in self._hearts

    def heard(self, rank: int, process: str, now: float) -> bool:
        """A heartbeat: from the first one on, the worker has a lease. False when it is not a member."""
        worker = self.workers.get(rank)
        if worker is None or not process or worker.process != process:
            return False
        self._leases.renew(rank, now)
        return True

    def spoke(self, worker: Worker, now: float) -> None:
        """Something of its exchange came: as good as a heartbeat, for who has a lease."""
        if self.is_current(worker) and self._leases.has(worker.rank):
            self._leases.renew(worker.rank, now)

    def silent(self, now: float) -> list[tuple[Worker, float]]:
        """Workers whose lease has ended, with the seconds since they were heard."""
        return [(self.workers[rank], self._leases.silent_s(rank, now)) for rank in self._leases.look(now)]
