"""The run: who comes and goes, what the policy makes of it, and when it is over.

Lives on the event loop, which is the only writer of policy, roster and counters; what happens to
contributions is in `contributions.py`. Nothing here knows gRPC, or which mode runs.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.segments import Segment
from ..observe.bus import Bus
from ..policies.base import Policy
from ..shards import orders
from ..shards.alone import Alone
from ..tensors.model import Model
from ..tensors.thread import TensorThread
from ..wire.connected import Done, SendWeights, Waiting, Worker
from .contributions import Contributions
from .facts import WorkerJoined, WorkerLeft
from .membership import replaced
from .roster import Asked, Roster

log = get_logger()

_SAY_WAITING_S = 1.0


class Run:
    """One run from the first join to the final weights.

    `finished` resolves when the run is over: with None, or the error that ended it.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        now: Callable[[], float] = time.monotonic,
        bus: Bus | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.name = secrets.token_hex(6)
        self.incarnation = 1  # of this server, in the run
        self.saved_version = 0  # of the newest snapshot of this shard
        self.skipped_snapshots: list[str] = []  # damaged ones, newer than the one it goes on from
        self.bus = bus or Bus()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.final: dict[str, float] = {}
        self.tensors = TensorThread(self.fail)
        self.model = Model(config, self.tensors, policy.contribution == "gradient")
        self.roster = Roster(config.run.workers, config.limits.workers, config.server.lease_s)
        self.on_begin: Callable[[], object] = lambda: None
        self.before_final: Callable[[], Awaitable[None]] | None = None
        self.contributions = Contributions(
            config, policy, self.roster, self.model, self.tensors, publish=self.bus.publish, now=now, fail=self.fail
        )
        self.shards: Alone = Alone(self)
        self._perform = self.contributions.perform
        self.now = now
        self._bringer: Worker | None = None  # of the initial weights
        self._lost_at: dict[int, float] = {}
        self._holds = False  # everyone waits for the first snapshot
        self._done_sent = False
        self._said_waiting_at = -math.inf

    # ---- a worker's way in ----------------------------------------------------------------

    def join(self, asked: Asked, **where: Any) -> Worker:
        """Seat a process; an older one with this rank is told that it was replaced."""
        if asked.run and asked.run != self.name:
            raise refusal(
                Reason.RUN_MISMATCH,
                f"this worker belongs to run {asked.run}, the server runs {self.name}: it was started anew",
                fix="start the worker again to join the new run",
            )
        if self.contributions.is_closed:
            raise _stopping()
        may_resume = self._may_resume(asked)
        if self._done_sent and not may_resume:
            raise refusal(Reason.DRAINING, "the run is over", fix="start ps-server again for another run")
        worker, old = self.roster.seat(asked)
        self._lost_at.pop(worker.rank, None)
        worker.resumes = worker.is_away = may_resume  # until it has said what it trains
        if old is not None:
            self._displace(old, worker)
        log.info("joined", rank=worker.rank, incarnation=worker.seat.incarnation, resumed=may_resume, **where)
        step = self.policy.num_counted.get(worker.rank, 0)
        self.bus.publish(self.now(), WorkerJoined(worker.rank, worker.seat.incarnation, step, may_resume))
        return worker

    def _may_resume(self, asked: Asked) -> bool:
        """The process lost a connection and nothing else: it goes on where it was."""
        known = self.roster.find(asked.rank, asked.incarnation) if asked.rank is not None else None
        return known is not None and asked.server_incarnation == self.incarnation and known.rank in self.policy.members

    def _displace(self, old: Worker, new: Worker) -> None:
        old.evict(replaced(old.rank, old.seat.incarnation))
        if new.resumes:
            self.shards.happens(orders.Away(old.rank, old.seat.incarnation))
            self.policy.disconnected(new.rank)
            new.staleness, new.hyperparameters = old.staleness, old.hyperparameters
            return
        self.bus.publish(
            self.now(), WorkerLeft(old.rank, old.seat.incarnation, "replaced", "another process took its rank")
        )
        now = self.shards.happens(orders.Left(old.rank, old.seat.incarnation))
        self._perform(self.policy.left(old.rank, now))
        log.warning("replaced", rank=old.rank, incarnation=old.seat.incarnation, by=new.seat.incarnation)

    def offer(self, worker: Worker, layout: Layout, optimizer: OptimizerSpec) -> None:
        """A worker says what it trains. The first one's model and optimizer are the run's."""
        if not self.roster.is_current(worker):
            raise refusal(Reason.NOT_JOINED, f"rank {worker.rank} was let go before it said what it trains")
        self.model.agree(worker.rank, layout, optimizer)
        if worker.resumes:
            self.shards.happens(orders.Resumed(worker.rank, worker.seat.incarnation))
            worker.state, worker.is_away = "computing", False
            log.info("resumed", rank=worker.rank, step=self.policy.num_counted[worker.rank], tensors=worker.stats.lane)
            return
        worker.state = "waiting"
        self.shards.offered(worker)

    def admit(self, worker: Worker) -> None:
        """A worker has said what it trains, to all shards: it gets weights, or is asked for them."""
        worker.is_admitted = True
        if self._holds:
            return
        if self.model.has_weights:
            self.enter(worker)
        elif self._bringer is None:
            self._ask_for_weights(worker)

    def _ask_for_weights(self, worker: Worker) -> None:
        self.shards.happens(orders.Bring(worker.rank, worker.seat.incarnation))
        self._bringer = worker
        worker.state = "uploading"
        worker.outbox.put_nowait(SendWeights())

    def initialise(self, worker: Worker, weights: Segment) -> None:
        """The initial weights have come, uint8 [total_bytes], to this shard."""
        if self.model.has_weights or worker is not self._bringer:
            raise refusal(Reason.BAD_REQUEST, "initial weights without having been asked for them")
        self.model.check_finite(worker.rank, weights)
        self.shards.brought(worker, weights)

    def begin(self, weights: Segment) -> None:
        """They have come to all shards: build the store and let everyone in."""
        self.shards.happens(orders.Begin())
        self.model.begin(weights)
        self.on_begin()
        if self.shards.is_writing:  # a shard lost before all have something to go back to would be the end
            self._holds = True
            holding = asyncio.ensure_future(self.shards.settled())
            holding.add_done_callback(lambda _: self._enter_all())
        else:
            self._enter_all()

    def _enter_all(self) -> None:
        self._holds = False
        if self.contributions.is_closed:
            return
        for waiting in list(self.workers.values()):
            if waiting.is_admitted and waiting.state in ("waiting", "uploading"):
                self.enter(waiting)

    def enter(self, worker: Worker) -> None:
        """Let a worker in; its answer comes when the mode allows it to start."""
        now = self.shards.happens(orders.Entered(worker.rank, worker.seat.incarnation))
        worker.state = "waiting"
        worker.waiting_since = self.now()
        decisions = self.policy.joined(worker.rank, now)
        log.info("admitted", rank=worker.rank, step=self.policy.num_counted[worker.rank], tensors=worker.stats.lane)
        self._perform(decisions)

    @property
    def min_step(self) -> int:
        """Training steps (batches) behind the slowest live rank."""
        return min((self.policy.steps_done(rank) for rank in self.policy.members or self.policy.num_counted), default=0)

    @property
    def durable_version(self) -> int:
        """Of the newest snapshot that all shards have."""
        return min(self.saved_version, self.shards.durable_version(self.saved_version))

    @property
    def workers(self) -> dict[int, Worker]:
        return self.roster.workers

    def ask_again(self, worker: Worker, step: int) -> None:
        """A worker asks again for the answer to a contribution that counts already."""
        self.contributions.check_repeat(worker, step)
        self.shards.asked(worker, step)

    # ---- the end --------------------------------------------------------------------------

    def finish(self, worker: Worker, transfer_s: float, can_evaluate: bool) -> None:
        """A worker has taken all its steps; it is told the final weights when all have."""
        worker.stats.transfer_s += transfer_s
        worker.state, worker.can_evaluate = "finished", can_evaluate
        log.info("finished", rank=worker.rank, steps=worker.stats.steps)
        if self._done_sent:  # it lost its connection when it was told
            self.tensors.then(lambda: self._send_done([worker], []))
        self._end_if_over()

    def _end_if_over(self) -> None:
        """The run ends when everyone has finished, those included who were lost a moment ago and may come back."""
        live = list(self.workers.values())
        if not self._done_sent and self._absent():
            return
        if not live and self.roster.was_anyone_here and (self._done_sent or self.is_any_rank_through()):
            self._resolve(None)
        if self._done_sent or not live or any(worker.state != "finished" for worker in live):
            return
        self._done_sent = True
        evaluators = sorted(worker.rank for worker in live if worker.can_evaluate)
        if self.before_final is None:
            self._tell_done(live, evaluators[:1])
        else:  # once a worker has left, what it did cannot be done again
            saving = asyncio.ensure_future(self.before_final())
            saving.add_done_callback(lambda _: self._tell_done(live, evaluators[:1]))

    def _tell_done(self, live: list[Worker], evaluators: list[int]) -> None:
        self.shards.happens(orders.Done(tuple(evaluators)))
        self.tensors.then(lambda: self._send_done(live, evaluators))

    def _send_done(self, live: list[Worker], evaluators: list[int]) -> None:
        for worker in live:
            worker.outbox.put_nowait(Done(self.model.publisher.latest.version, worker.rank in evaluators))

    def report(self, worker: Worker, metrics: dict[str, float]) -> None:
        """Figures of the final evaluation."""
        self.final.update(metrics)

    def stream_ended(self, worker: Worker, reason: str) -> None:
        """A worker's stream broke off. While its heart beats it may come back to where it was."""
        if not self.roster.is_current(worker):
            return
        if self.roster.has_heart(worker) and worker.rank in self.policy.members:
            worker.is_away, worker.state = True, "away"
            self.shards.happens(orders.Away(worker.rank, worker.seat.incarnation))
            self.policy.disconnected(worker.rank)
            log.warning("away", rank=worker.rank, incarnation=worker.seat.incarnation, reason=reason)
        else:
            self.leave(worker, reason)

    def heart_stopped(self, process: str) -> None:
        """A heartbeat stream has ended; who had lost its other one before is gone now."""
        worker = self.roster.heart_stopped(process)
        if worker is not None:
            self.leave(worker, "connection lost")

    def heard(self, rank: int, process: str) -> bool:
        """A heartbeat; False when this process is not a member."""
        return self.roster.heard(rank, process, self.now())

    def leave(self, worker: Worker, reason: str, how: str = "closed") -> None:
        """A worker is gone. Harmless when a newer process has its rank."""
        if not self.roster.remove(worker):
            return
        event = log.info if how == "goodbye" else log.warning
        event("left", rank=worker.rank, incarnation=worker.seat.incarnation, reason=reason)
        self.bus.publish(self.now(), WorkerLeft(worker.rank, worker.seat.incarnation, how, reason))
        if self._bringer is worker and not self.model.has_weights:
            self._bringer = None
            heirs = [w for w in self.workers.values() if w.state == "waiting" and w.is_admitted]
            if heirs:
                self._ask_for_weights(heirs[0])
            else:  # its model is nobody's
                self.model.forget()
        if self.contributions.is_closed:
            return
        was_member = worker.rank in self.policy.members
        now = self.shards.happens(orders.Left(worker.rank, worker.seat.incarnation))
        self._perform(self.policy.left(worker.rank, now))
        if was_member and how != "goodbye" and self.policy.next_local_steps(worker.rank):
            self._lost_at[worker.rank] = self.now()
        self._end_if_over()

    def _absent(self) -> list[int]:
        """Ranks that were lost before their last step, and not long ago."""
        since = self.now() - self.config.server.absent_s
        return sorted(rank for rank, lost_at in self._lost_at.items() if lost_at > since)

    def is_any_rank_through(self) -> bool:
        """Some rank has taken all its steps: a script may leave then without a word."""
        return any(self.policy.next_local_steps(rank) == 0 for rank in self.policy.num_counted)

    def fail(self, error: BaseException) -> None:
        """End the run with an error; every worker is told, and nothing more is applied."""
        self.contributions.is_closed = True
        if isinstance(error, ParamServerError):
            for worker in self.workers.values():
                worker.refuse(error)
        self._resolve(error)

    def _resolve(self, error: BaseException | None) -> None:
        if self.finished.done():
            return
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)

    def drain(self) -> None:
        """The server stops: every worker is told, so that it need not find out. Nothing is decided any more:
        a round that everyone leaves is not to be closed with those who leave last."""
        self.contributions.is_closed = True
        for worker in self.workers.values():
            worker.refuse(_stopping())

    # ---- time -----------------------------------------------------------------

    def tick(self) -> None:
        """Called every fraction of a second: time-outs, and a sign of life to those who wait."""
        if self.contributions.is_closed:
            return
        now = self.now()
        for worker, silent_s in self.roster.silent(now):
            self._evict(worker, silent_s)
        if self.model.has_weights:
            self._perform(self.policy.tick(self.shards.happens(orders.Tick())))
        self._end_if_over()
        self.say_waiting()

    def say_waiting(self) -> None:
        """Once a second, a sign of life to everyone who waits."""
        now = self.now()
        if now - self._said_waiting_at < _SAY_WAITING_S:
            return
        self._said_waiting_at = now
        reasons = self.policy.waiting(now)
        for worker in self.workers.values():
            if worker.state in ("waiting", "finished") and worker.outbox.empty():
                worker.outbox.put_nowait(Waiting(self.waiting_for(worker, reasons)))

    def _evict(self, worker: Worker, silent_s: float) -> None:
        reason = f"not heard of for {silent_s:.1f} s (server.lease_s is {self.config.server.lease_s:g})"
        self.leave(worker, reason, how="lease")
        worker.evict(refusal(Reason.NOT_JOINED, f"rank {worker.rank} was let go: {reason}"))

    def waiting_for(self, worker: Worker, reasons: dict[int, str]) -> str:
        if worker.state == "finished":
            busy = sorted(other.rank for other in self.workers.values() if other.state != "finished")
            names = ", ".join(map(str, busy or self._absent()))
            return f"rank {names} to {'finish' if busy else 'come back'}" if names else ""
        if worker.is_away:
            return "its connection"
        if shard := self.shards.waiting_for(worker):
            return shard
        if worker.state != "waiting":
            return ""
        if self._holds:
            return "the first snapshot on all shards"
        if not self.model.has_weights and self._bringer is not None:
            return f"initial weights from rank {self._bringer.rank}"
        return reasons.get(worker.rank, "")

    def division(self, worker: Worker) -> tuple[int, int]:
        """(num_workers, index): how the data is divided for this worker."""
        if self.config.run.workers is not None:
            return self.config.run.workers, worker.rank
        ranks = self.roster.live_ranks
        return len(ranks), ranks.index(worker.rank) if worker.rank in ranks else 0

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first answer to the last contribution."""
        done = self.contributions
        if done.started_at is None:
            return done.elapsed_before_s
        is_over = self._done_sent or not self.workers
        end = done.ended_at if is_over and done.ended_at is not None else self.now()
        return done.elapsed_before_s + end - done.started_at


def _stopping() -> ParamServerError:
    return refusal(Reason.DRAINING, "the server is stopping", fix="start ps-server again")
