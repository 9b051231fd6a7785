"""Who is here: which process holds which rank, and its signs of life. Decides nothing about training.

    joins ──> connected ──goodbye──────────────────────────────> gone
                  │  ▲
    stream lost   │  │ the same process joins again
                  ▼  │
                away ──its heartbeat connection closes, or its lease ends──> gone

A rank is a worker's stable name; an incarnation is a number that grows with every join of a rank. The newest
incarnation is the rank: an older process that still speaks is fenced.

A process that dies closes all its connections at once, and is gone at once. One that loses only the connection of its
exchange is away, and comes back to where it was. A worker without heartbeats (any client may do without) is gone when
its stream ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...common.errors import ParamServerError, Reason, refusal
from ...common.standstill import Standstill
from .counting.stats import WorkerStats
from .events import Joined

# More joins of one rank than this between two snapshots are not believed.
_MAX_UNKNOWN_JOINS = 10_000
_LOOK_S = 0.2  # how often leases are looked at


@dataclass(eq=False, slots=True)
class Worker:
    """One process that has a rank."""

    rank: int
    incarnation: int
    process: str = ""  # whose heartbeats count for it
    model: tuple[str, str] = ("", "")  # model and optimizer it has offered, on all shards
    rendezvous: str = ""  # HOST:PORT where a group meets whose lowest rank it is
    is_resumed: bool = False  # goes on where it was: no START is due
    is_away: bool = False  # its stream is lost, its process is not; or it is on its way back
    is_finished: bool = False
    can_evaluate: bool = False
    heard_at: float | None = None  # its newest sign of life; None: it has said no first word, and has no lease
    waiting_since: float | None = None
    staleness: int = 0  # of its contribution that is not replied yet
    wants_weights: bool = True  # with the reply to it
    evaluates: bool = False  # that reply's weights
    num_asked: int = 0  # so many of its next replies long it may say what it evaluated, as a reply asked it to
    hyperparameters: tuple[dict[str, Any], ...] | None = None  # as it said last
    num_contributed: int = 0  # since this process began: how far its own schedules are

    @property
    def has_offered(self) -> bool:
        return bool(self.model[0])

    def goes_on_from(self, old: Worker) -> None:
        """The same process on a new stream."""
        self.is_resumed = self.is_away = True  # away until all shards know what it trains
        self.model, self.staleness, self.wants_weights = old.model, old.staleness, old.wants_weights
        self.rendezvous = old.rendezvous
        self.evaluates, self.num_asked = old.evaluates, old.num_asked
        self.hyperparameters, self.num_contributed = old.hyperparameters, old.num_contributed


class Roster:
    """All workers of a run, one per rank at most: ranks 0 to num_workers - 1, or any where that is None."""

    def __init__(self, num_workers: int | None, limit: int, lease_s: float) -> None:
        self.num_workers = num_workers
        self.workers: dict[int, Worker] = {}
        self.num_finished = 0  # of those
        self._ranks: list[int] = []  # of those, ascending
        self._ranks_of: dict[str, dict[int, None]] = {}  # of those, by process
        self._leased: OrderedDict[int, None] = OrderedDict()  # ranks with a lease, the last heard from comes last
        self.stats: dict[int, WorkerStats] = {}
        self.num_joins: dict[int, int] = {}  # per rank; the incarnation of its newest process
        self._limit = limit
        self._lease_s = lease_s
        self._processes: dict[int, str] = {}  # of each rank's newest join
        self._unknown_joins = 0  # that a rank may have had and that are not known here
        self.evaluators: set[str] = set()  # processes that evaluate and do not train
        self.heartbeats: Counter[str] = Counter()  # heartbeat streams that are open, by process
        self._standstill = Standstill(_LOOK_S)
        self.was_anyone_here = False
        self.evicted: set[int] = set()  # ranks that may not come back

    def restore(self, num_joins: Mapping[int, int]) -> None:
        """Go on from a snapshot: what joined after it was taken is known to the workers alone."""
        self.num_joins = dict(num_joins)
        self._unknown_joins = _MAX_UNKNOWN_JOINS

    def longest_wait_s(self, now: float) -> float:
        """For how long the worker has waited that waits longest; 0 when none waits."""
        since = [worker.waiting_since for worker in self.workers.values() if worker.waiting_since is not None]
        return now - min(since, default=now)

    def seat(self, joined: Joined) -> tuple[Worker, Worker | None]:
        """A place for a process, and the worker of an older process or stream that had it.

        No rank: the lowest free one. `asked.incarnation` is what this same process had before a lost connection, 0 on
        its first join; it may be higher than any known here after a server went back to a snapshot. `asked.process`
        may not have heard of the incarnation it was given last. Refuses LIMIT_EXCEEDED, RANK_OUT_OF_RANGE, RUN_FULL,
        and REPLACED when a newer process holds the rank.
        """
        if joined.rank not in self.workers and len(self.workers) >= self._limit:
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"{len(self.workers)} workers are here, and this server takes {self._limit} (limits.workers)",
                fix="start ps-server with --workers N, or --set limits.workers=N",
            )
        rank = self._free_rank() if joined.rank is None else joined.rank
        if self.num_workers is not None and rank >= self.num_workers:
            raise refusal(
                Reason.RANK_OUT_OF_RANGE,
                f"no rank {rank}: the run has {self.num_workers} workers, ranks 0 to {self.num_workers - 1}",
                fix=f"use --rank 0 to {self.num_workers - 1}, or start ps-server with --workers {rank + 1} or more",
            )
        if rank in self.evicted:
            raise evicted(rank)
        newest, previous = self.num_joins.get(rank, 0), joined.incarnation
        if newest < previous <= newest + self._unknown_joins:
            newest = previous
        known = self._processes.get(rank, "")
        is_newest = joined.process == known if joined.process and known else previous == newest
        if previous and not is_newest:
            raise replaced(rank, previous)
        if (old := self.workers.get(rank)) is not None:
            self.remove(old)
        worker = self.workers[rank] = Worker(rank, newest + 1, joined.process)
        insort(self._ranks, rank)
        self._ranks_of.setdefault(joined.process, {})[rank] = None
        self.num_joins[rank], self._processes[rank] = worker.incarnation, joined.process
        stats = self.stats.setdefault(rank, WorkerStats(rank))
        if not previous:  # the same process is no restart
            stats.joined_anew()
        self.was_anyone_here = True
        return worker, old

    def _free_rank(self) -> int:
        # Ranks ascend, so those below the first gap are where they would be without one.
        rank = bisect_left(range(len(self._ranks)), 1, key=lambda position: int(self._ranks[position] > position))
        if self.num_workers is not None and rank >= self.num_workers:
            raise refusal(
                Reason.RUN_FULL,
                f"all {self.num_workers} ranks of the run are taken",
                fix=f"start ps-server with --workers {self.num_workers + 1} or more",
            )
        return rank

    def remove(self, worker: Worker) -> None:
        """The worker is gone; nothing happens when its rank is another's already."""
        rank = worker.rank
        if self.find(rank, worker.incarnation) is not worker:
            return
        del self.workers[rank]
        del self._ranks[bisect_left(self._ranks, rank)]
        del self._ranks_of[worker.process][rank]
        if not self._ranks_of[worker.process]:
            del self._ranks_of[worker.process]
        self._leased.pop(rank, None)
        self.num_finished -= worker.is_finished

    def finished(self, worker: Worker) -> None:
        """It takes no more training steps."""
        self.num_finished += not worker.is_finished
        worker.is_finished = True

    def division(self, rank: int) -> tuple[int, int]:
        """(num_workers, index): how the data is divided for this rank."""
        if self.num_workers is not None:
            return self.num_workers, rank
        return len(self._ranks), bisect_left(self._ranks, rank)

    def find(self, rank: int, incarnation: int) -> Worker | None:
        """The worker of this incarnation, while it holds the rank."""
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.incarnation == incarnation else None

    # ---- signs of life --------------------------------------------------------------------

    def heartbeat_stopped(self, process: str) -> Worker | None:
        """A heartbeat stream has ended. Returns the worker that is gone with it."""
        self.heartbeats[process] -= 1
        if self.heartbeats[process] > 0:
            return None
        del self.heartbeats[process]
        self.evaluators.discard(process)
        seats = [self.workers[rank] for rank in self._ranks_of.get(process, ())]
        return next((worker for worker in seats if worker.is_away), None)

    def heartbeat(self, rank: int, process: str, now: float) -> None:
        """A heartbeat: from the first one on, the worker has a lease."""
        if self.is_member(rank, process):
            self.workers[rank].heard_at = now
            self._leased[rank] = None
            self._leased.move_to_end(rank)

    def is_member(self, rank: int, process: str) -> bool:
        """Whether this process holds the rank."""
        return bool(process) and rank in self.workers and self.workers[rank].process == process

    def spoke(self, worker: Worker, now: float) -> None:
        """Something of its exchange came: as good as a heartbeat, for who has a lease."""
        if worker.heard_at is not None:
            worker.heard_at = now
            self._leased.move_to_end(worker.rank)

    def silent(self, now: float) -> list[tuple[Worker, float]]:
        """Workers whose lease has ended, by rank, with the seconds since they were heard; to be asked every `_LOOK_S`.
        The time in which this process was frozen itself does not count: nobody could be heard then."""
        if pause_s := self._standstill.look(now):
            for rank in self._leased:
                worker = self.workers[rank]
                assert worker.heard_at is not None
                worker.heard_at = min(now, worker.heard_at + pause_s)
        found = []
        for rank in self._leased:
            worker = self.workers[rank]
            assert worker.heard_at is not None
            if now - worker.heard_at <= self._lease_s:
                break  # the others were heard later
            found.append((worker, now - worker.heard_at))
        return sorted(found, key=lambda silent: silent[0].rank)


def replaced(rank: int, incarnation: int) -> ParamServerError:
    """The refusal an older process of a rank gets."""
    return refusal(
        Reason.REPLACED,
        f"another process joined as rank {rank} (this one was incarnation {incarnation}): only the newest may go on",
        fix="give every worker its own --rank",
    )


def evicted(rank: int) -> ParamServerError:
    """The refusal of a worker that somebody has put out."""
    fix = "a server that is started again lets it in"
    return refusal(Reason.EVICTED, f"rank {rank} was evicted from this run", fix=fix)
