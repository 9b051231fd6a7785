"""Shards 1, 2, ...: their part of the model, and the coordinator's events carried out on it.

A worker is seated by the coordinator and comes here with that seat. What it says here is reported; what
becomes of it comes back as an event. So a worker may be ahead of the events about it: until it has
entered it is `attached`, and only from then on in the roster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.segments import Segment
from ..core.membership import Seat, replaced
from ..core.roster import Asked
from ..core.run import Run
from ..core.stats import WorkerStats
from ..observe.bus import Bus
from ..policies.base import Policy
from ..wire.connected import SendWeights, Worker
from . import orders
from .alone import Alone, StagedPart

log = get_logger()


class EndedError(ParamServerError):
    """The coordinator has ended the run with an error; this shard ends with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(f"the coordinator ended the run: {message}")
        self.exit_code = exit_code


class Reporting(Alone):
    """What has come here is reported; `report` sends it to the coordinator."""

    def __init__(self, run: Run, report: Callable[[orders.Report], object]) -> None:
        super().__init__(run)
        self.report = report
        self.parts: dict[int, tuple[Worker, StagedPart]] = {}  # reported, not taken yet
        self.time = 0.0  # the coordinator's, of the newest event

    def offered(self, worker: Worker) -> None:
        self.report(orders.Offered(worker.rank, worker.seat.incarnation))

    def brought(self, worker: Worker, weights: Segment) -> None:
        self.report(orders.Brought(worker.rank, worker.seat.incarnation))

    def staged(self, worker: Worker, part: StagedPart) -> None:
        self.forget(worker.rank, worker.seat.incarnation - 1)
        worker.state = "waiting"
        self.parts[worker.rank] = (worker, part)
        self.report(orders.Staged(worker.rank, worker.seat.incarnation, part.contribution.number, part.judgement))

    def asked(self, worker: Worker, step: int) -> None:
        worker.state = "waiting"
        self.report(orders.Asked(worker.rank, worker.seat.incarnation, step))

    def happens(self, event: orders.Event) -> float:
        return self.time

    def waiting_for(self, worker: Worker | None = None) -> str:
        return "the coordinator" if worker is not None and worker.state == "waiting" else ""

    def forget(self, rank: int, incarnation: int) -> None:
        """Nothing that this incarnation or an older one has sent will be taken."""
        if rank in self.parts and self.parts[rank][0].seat.incarnation <= incarnation:
            _, part = self.parts.pop(rank)
            self._run.model.staging.give_back(part.body)


class FollowerRun(Run):
    """The run as another shard decides it."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        name: str,
        incarnation: int,
        report: Callable[[orders.Report], object],
        bus: Bus | None = None,
    ) -> None:
        super().__init__(config, policy, bus=bus)
        self.name, self.incarnation = name, incarnation
        self.shards: Reporting = Reporting(self, report)
        self.take_snapshot: Callable[[], object] = lambda: None
        self._attached: dict[int, Worker] = {}
        self._weights: Segment | None = None

    # ---- a worker's way in --------------------------------------------------------------------

    def join(self, asked: Asked, **where: Any) -> Worker:
        """Let a process in that the coordinator has seated."""
        server = self.config.server
        if not asked.is_seated or asked.rank is None:
            raise refusal(
                Reason.SHARD_MISMATCH,
                f"this is shard {server.shard} of {server.shards}: workers join the coordinator",
                fix=f"ps-worker --server {server.coordinator}",
            )
        if asked.run != self.name:
            raise refusal(
                Reason.RUN_MISMATCH,
                f"the worker belongs to run {asked.run}, shard {server.shard} to run {self.name}",
                fix="every shard needs the coordinator of its own run (--coordinator)",
            )
        if asked.server_incarnation != self.incarnation or self.contributions.is_closed:
            raise refusal(Reason.NOT_READY, f"shard {server.shard} has not gone back yet, or is stopping")
        old = self._attached.get(asked.rank)
        if old is not None and old.seat.incarnation > asked.incarnation:
            raise replaced(asked.rank, asked.incarnation)
        if old is not None:
            old.evict(replaced(asked.rank, old.seat.incarnation))
        stats = self.roster.stats.setdefault(asked.rank, WorkerStats(asked.rank))
        stats.lane = "tcp"  # until it offers a segment
        worker = Worker(Seat(asked.rank, asked.incarnation), stats, process=asked.process, is_seated=True)
        worker.resumes = asked.resumes
        self._attached[asked.rank] = worker
        return worker

    def offer(self, worker: Worker, layout: Layout, optimizer: OptimizerSpec) -> None:
        """It has said what it trains. Whether that is the run's model the coordinator has to say first."""
        worker.offer = (layout, optimizer)
        worker.state = "computing" if worker.resumes else "waiting"
        self.shards.offered(worker)

    def initialise(self, worker: Worker, weights: Segment) -> None:
        self.model.check_finite(worker.rank, weights)
        self._weights = weights
        self.shards.brought(worker, weights)

    def ask_again(self, worker: Worker, step: int) -> None:
        self.shards.asked(worker, step)

    # ---- who goes -----------------------------------------------------------------------------

    def stream_ended(self, worker: Worker, reason: str) -> None:
        """The worker closes its other streams too, and the coordinator says what that means."""

    def leave(self, worker: Worker, reason: str, how: str = "closed") -> None:
        """As above."""

    def heart_stopped(self, process: str) -> None:
        """Hearts beat for the coordinator."""

    def heard(self, rank: int, process: str) -> bool:
        return False

    def tick(self) -> None:
        self.say_waiting()

    def _end_if_over(self) -> None:
        """The coordinator says when."""

    # ---- what happens ---------------------------------------------------------------------------

    def happened(self, event: orders.Event, now: float) -> None:
        """An event of the coordinator's, in its order."""
        self.shards.time = now
        match event:
            case orders.Bring(rank, incarnation):
                worker = self._seated(rank, incarnation)
                self._agree(worker)
                worker.state = "uploading"
                worker.outbox.put_nowait(SendWeights())
            case orders.Begin():
                assert self._weights is not None
                self.model.begin(self._weights)
                self._weights = None
            case orders.Entered(rank, incarnation):
                worker = self._seated(rank, incarnation)
                self.model.staging.make_room(len(self.workers) + 1)
                self.roster.place(worker)
                self._agree(worker)
                self.enter(worker)
            case orders.Resumed(rank, incarnation):
                self._resume(self._seated(rank, incarnation))
            case orders.Away(rank, incarnation):
                self._away(rank, incarnation)
            case orders.Left(rank, incarnation):
                self._left(rank, incarnation, now)
            case orders.Taken(rank, incarnation, step, judgement):
                worker, part = self.shards.parts.pop(rank)
                assert (worker.seat.incarnation, part.contribution.number) == (incarnation, step)
                self.contributions.take(worker, part._replace(judgement=judgement), now)
            case orders.Repeated(rank, incarnation):
                self.contributions.repeat(self._seated(rank, incarnation), now)
            case orders.Tick():
                if self.model.has_weights:
                    self._perform(self.policy.tick(now))
            case orders.TakeSnapshot():
                self.take_snapshot()
            case orders.Done(evaluators):
                self._done_sent = True
                live = list(self.workers.values())
                self.tensors.then(lambda: self._send_done(live, list(evaluators)))
            case orders.End(error, exit_code):
                self._resolve(EndedError(error, exit_code) if error else None)

    def _seated(self, rank: int, incarnation: int) -> Worker:
        worker = self._attached[rank]
        assert worker.seat.incarnation == incarnation
        return worker

    def _agree(self, worker: Worker) -> None:
        """Its model is the run's: the coordinator has taken it. A refusal is one of this shard's own."""
        assert worker.offer is not None
        try:
            self.model.agree(worker.rank, *worker.offer)
        except ParamServerError as error:
            worker.evict(error)
            raise

    def _resume(self, worker: Worker) -> None:
        old = self.workers.get(worker.rank)
        if old is not None:
            worker.staleness = old.staleness
            worker.hyperparameters = worker.hyperparameters or old.hyperparameters
        self.roster.place(worker)
        log.info("resumed", rank=worker.rank, tensors=worker.stats.lane)

    def _away(self, rank: int, incarnation: int) -> None:
        self.shards.forget(rank, incarnation)
        worker = self.roster.find(rank, incarnation)
        if worker is not None:
            worker.is_away, worker.state = True, "away"
            self.policy.disconnected(rank)
            worker.interrupt()

    def _left(self, rank: int, incarnation: int, now: float) -> None:
        self.shards.forget(rank, incarnation)
        attached = self._attached.get(rank)
        if attached is not None and attached.seat.incarnation <= incarnation:
            del self._attached[rank]
            if self._done_sent:
                pass  # it says goodbye here too
            else:
                attached.evict(refusal(Reason.NOT_JOINED, f"rank {rank} was let go by the coordinator"))
        worker = self.roster.find(rank, incarnation)
        if worker is None:
            return
        self.roster.remove(worker)
        if not self.model.has_weights:
            self.model.forget()
            self._weights = None
        self._perform(self.policy.left(rank, now))
