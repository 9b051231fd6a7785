"""The workers of a run: which process holds which rank, and its signs of life. Decides nothing about training.

    joins ──> connected ──goodbye──────────────────────────────> gone
                  │  ▲
    stream lost   │  │ the same process joins again
                  ▼  │
                away ──its heartbeat connection closes, or its lease ends──> gone

A rank is a worker's stable name. Its incarnation is a number that grows with every join. Only the newest incarnation
holds the rank: an older process that still sends is fenced.

A process that dies closes all its connections, and is gone at once. A process that loses only its exchange connection
is away, and continues after it joins again. A worker without heartbeats, which are optional, is gone when its stream
ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from ...common.errors import ParamServerError, Reason, refusal
from ...common.standstill import Standstill
from .counting import WorkerStats
from .events import Joined

# More joins of one rank than this between two snapshots are not believed.
_MAX_UNKNOWN_JOINS = 10_000
_LOOK_S = 0.2  # how often leases are looked at


@dataclass(eq=False, slots=True)
class Worker:
    """One process that holds a rank."""

    rank: int
    incarnation: int
    process: str = ""  # the process whose heartbeats count
    model: tuple[str, str] | None = None  # names of the model and optimizer, once it has offered them on all shards
    rendezvous: str = ""  # HOST:PORT where a group meets when this is its lowest rank
    is_resumed: bool = False  # continues where it was: no START is due
    is_away: bool = False  # its stream is lost and its process lives; or it is coming back
    is_finished: bool = False
    stays: bool = False  # once it has finished, for the final weights
    waiting_since: float | None = None
    staleness: int = 0  # of its pending contribution
    wants_weights: bool = True  # with the pending reply
    wants_exact: bool = False  # weights of exactly the version of that reply
    num_asked: int = 0  # replies during which it may send the metrics of a requested evaluation
    hyperparameters: tuple[dict[str, Any], ...] | None = None  # the newest ones that it sent

    def goes_on_from(self, old: Worker) -> None:
        """Continue as the same process on a new stream."""
        self.is_resumed = self.is_away = True  # away until all shards know what it trains
        self.model, self.staleness, self.wants_weights = old.model, old.staleness, old.wants_weights
        self.rendezvous = old.rendezvous
        self.wants_exact, self.num_asked = old.wants_exact, old.num_asked
        self.hyperparameters = old.hyperparameters


class Roster:
    """All workers of a run, at most one per rank: ranks 0 to num_workers - 1, or any rank where that is None."""

    def __init__(self, num_workers: int | None, limit: int, lease_s: float) -> None:
        self.num_workers = num_workers
        self.workers: dict[int, Worker] = {}
        self.num_finished = 0  # of those
        self._ranks: list[int] = []  # of those, ascending
        self._ranks_of: dict[str, dict[int, None]] = {}  # of those, by process
        # The newest sign of life of each rank with a lease, the last heard from comes last.
        self.heard_at: OrderedDict[int, float] = OrderedDict()
        self.stats: dict[int, WorkerStats] = {}
        self.num_joins: dict[int, int] = {}  # per rank; the incarnation of its newest process
        self._limit, self._lease_s = limit, lease_s
        self.processes: dict[int, str] = {}  # the process of each rank's newest join to this server
        self._unknown_joins = 0  # joins of a rank that this server may not know of
        self.outsiders: set[str] = set()  # processes that train nothing: they evaluate
        self.heartbeats: Counter[str] = Counter()  # heartbeat streams that are open, by process
        self._standstill = Standstill(_LOOK_S)
        self.evicted: set[int] = set()  # ranks that may not come back
        self.sizes: dict[int, int] = {}  # workers for which a rank stands, where it stands for several
        # Workers of other servers in the division of the data: those before the workers here, and all.
        self.num_before = self.num_others = 0

    def restore(self, num_joins: Mapping[int, int]) -> None:
        """Continue from a snapshot. Only the workers know of joins after it."""
        self.num_joins = dict(num_joins)
        self._unknown_joins = _MAX_UNKNOWN_JOINS

    def longest_wait_s(self, now: float) -> float:
        """Returns the longest time that a worker has been waiting; 0 when none waits."""
        since = [worker.waiting_since for worker in self.workers.values() if worker.waiting_since is not None]
        return now - min(since, default=now)

    def seat(self, joined: Joined) -> tuple[Worker, Worker | None]:
        """Seat a process; returns its worker, and the worker of an older process or stream that held the rank.

        Without a rank it gets the lowest free one. `joined.incarnation` is that of the same process before it lost its
        connection, and 0 on its first join. It may be higher than any known here, after a server went back to a
        snapshot. It may be lower than the newest, if the process never received that. Refuses LIMIT_EXCEEDED,
        RANK_OUT_OF_RANGE, RUN_FULL, and REPLACED when a newer process holds the rank.
        """
        if joined.rank not in self.workers and len(self.workers) >= self._limit:
            problem = f"{len(self.workers)} workers are here, and this server takes {self._limit} (limits.workers)"
            fix = "start ps-server with --workers N, or --set limits.workers=N"
            raise refusal(Reason.LIMIT_EXCEEDED, problem, fix=fix)
        rank = self._free_rank() if joined.rank is None else joined.rank
        if self.num_workers is not None and rank >= self.num_workers:
            problem = f"no rank {rank}: the run has {self.num_workers} workers, ranks 0 to {self.num_workers - 1}"
            fix = f"use --rank 0 to {self.num_workers - 1}, or start ps-server with --workers {rank + 1} or more"
            raise refusal(Reason.RANK_OUT_OF_RANGE, problem, fix=fix)
        if rank in self.evicted:
            raise evicted(rank)
        newest, previous = self.num_joins.get(rank, 0), joined.incarnation
        if newest < previous <= newest + self._unknown_joins:
            newest = previous
        elif not (newest or joined.run):  # it had not begun in the run of an earlier server
            previous = 0
        known = self.processes.get(rank, "")
        is_newest = joined.process == known if joined.process and known else previous == newest
        if previous and not is_newest:
            raise replaced(rank, previous)
        if (old := self.workers.get(rank)) is not None:
            self.remove(old)
        worker = self.workers[rank] = Worker(rank, newest + 1, joined.process)
        insort(self._ranks, rank)
        self._ranks_of.setdefault(joined.process, {})[rank] = None
        self.num_joins[rank], self.processes[rank] = worker.incarnation, joined.process
        self.stands_for(rank, joined.num_workers)
        stats = self.stats.setdefault(rank, WorkerStats(rank))
        if not previous:  # a join of the same process is not a restart
            stats.joined_anew(joined.at)
        stats.is_lost = False
        return worker, old

    def _free_rank(self) -> int:
        # The list ascends: below the first free rank, each rank equals its position.
        rank = bisect_left(range(len(self._ranks)), 1, key=lambda position: int(self._ranks[position] > position))
        if self.evicted:
            rank = next(free for free in count(rank) if free not in self.workers and free not in self.evicted)
        if self.num_workers is not None and rank >= self.num_workers:
            fix = f"start ps-server with --workers {self.num_workers + 1} or more"
            raise refusal(Reason.RUN_FULL, f"all {self.num_workers} ranks of the run are taken", fix=fix)
        return rank

    def remove(self, worker: Worker) -> None:
        """Remove a worker that is gone; without effect when another worker holds its rank."""
        rank = worker.rank
        if self.workers.get(rank) is not worker:
            return
        del self.workers[rank]
        del self._ranks[bisect_left(self._ranks, rank)]
        del self._ranks_of[worker.process][rank]
        if not self._ranks_of[worker.process]:
            del self._ranks_of[worker.process]
        self.heard_at.pop(rank, None)
        self.num_finished -= worker.is_finished

    def division(self, rank: int) -> tuple[int, int]:
        """Returns (num_workers, index): this rank's share of the data."""
        ranks = self._ranks if self.num_workers is None else range(self.num_workers)
        num_workers, index = len(ranks), bisect_left(ranks, rank)
        if self.sizes:
            sizes = [self.sizes.get(other, 1) for other in ranks]
            num_workers, index = sum(sizes), sum(sizes[:index])
        return num_workers + self.num_others, index + self.num_before

    def stands_for(self, rank: int, num_workers: int) -> None:
        """Note for how many workers a rank stands: several if it is a server of others, 0 if it is none."""
        if num_workers > 1 or (num_workers and rank in self.sizes):
            self.sizes[rank] = num_workers

    # ---- signs of life --------------------------------------------------------------------

    def heartbeat_stopped(self, process: str) -> Worker | None:
        """Note the end of a heartbeat stream; returns the worker that is gone with it."""
        self.heartbeats[process] -= 1
        if self.heartbeats[process] > 0:
            return None
        del self.heartbeats[process]
        self.outsiders.discard(process)
        seats = [self.workers[rank] for rank in self._ranks_of.get(process, ())]
        return next((worker for worker in seats if worker.is_away), None)

    def heartbeat(self, rank: int, process: str, now: float) -> None:
        """Note a heartbeat. From its first one on, the worker has a lease."""
        if self.is_member(rank, process):
            self.heard_at[rank] = now
            self.heard_at.move_to_end(rank)

    def is_member(self, rank: int, process: str) -> bool:
        """Whether this process holds the rank."""
        return bool(process) and rank in self.workers and self.workers[rank].process == process

    def silent(self, now: float) -> list[tuple[Worker, float]]:
        """Returns the workers whose lease has ended, by rank, with the seconds since their last message.

        The caller asks every `_LOOK_S`. Time in which this process itself was frozen does not count."""
        if pause_s := self._standstill.look(now):
            for rank, heard_at in self.heard_at.items():
                self.heard_at[rank] = min(now, heard_at + pause_s)
        # Those heard from earliest come first.
        silent = list(takewhile(lambda item: now - item[1] > self._lease_s, self.heard_at.items()))
        return [(self.workers[rank], now - heard_at) for rank, heard_at in sorted(silent)]


def replaced(rank: int, incarnation: int) -> ParamServerError:
    """Returns the refusal of an older process of a rank."""
    problem = f"another process joined as rank {rank} (this one was incarnation {incarnation})"
    fix = "give every worker its own --rank"
    return refusal(Reason.REPLACED, f"{problem}: only the newest may go on", fix=fix)


def evicted(rank: int) -> ParamServerError:
    """Returns the refusal of an evicted worker."""
    return refusal(Reason.EVICTED, f"rank {rank} was evicted from this run", fix="a restarted server admits it again")
