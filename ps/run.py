"""The run: carries out what the policy decides, on the store, for the workers that wait.

Lives on the event loop, which is the only writer of policy, membership and counters. Tensor
work goes to one thread in the order of the decisions, so what the policy has decided and what
the store has done differ only in time. Nothing here knows gRPC, or which mode runs.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..common.config import Config
from ..common.errors import DivergedError, ParamServerError, Reason, refusal
from ..common.layout import Layout
from ..common.log import get_logger
from ..common.optimizers import Hyperparameters, OptimizerSpec, find_optimizer
from .connected import Done, Go, Measured, SendWeights, Waiting, Worker
from .membership import Membership, replaced
from .policies.base import Answer, Commit, Contribution, Decision, Discard, Fold, Policy, Refuse
from .replies import Replies
from .staging import StagingPool
from .stats import WorkerStats
from .store import Store
from .tensor_thread import TensorThread

log = get_logger()

_SAY_WAITING_S = 1.0


class Run:
    """One run from the first join to the final weights.

    `finished` resolves when the run is over: with None, or the error that ended it.
    """

    def __init__(self, config: Config, policy: Policy, now: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.policy = policy
        self.name = secrets.token_hex(6)
        self.membership = Membership(config.run.workers)
        self.layout: Layout | None = None
        self.optimizer: OptimizerSpec | None = None
        self.store: Store | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stats: dict[int, WorkerStats] = {}
        self.final: dict[str, float] = {}
        self.tensors = TensorThread(self.fail)
        self.workers: dict[int, Worker] = {}
        self._now = now
        self._bringer: Worker | None = None  # of the initial weights
        self._staged: dict[int, torch.Tensor] = {}  # accepted, not folded yet
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._done_sent = False
        self._said_waiting_at = -math.inf

    # ---- a worker's way in ----------------------------------------------------------------

    def join(self, rank: int | None, previous: int, run: str, **where: Any) -> Worker:
        """Seat a process; an older one with this rank is told that it was replaced."""
        if run and run != self.name:
            raise refusal(
                Reason.RUN_MISMATCH,
                f"this worker belongs to run {run}, the server runs {self.name}: it was started anew",
                fix="start the worker again to join the new run",
            )
        if self._done_sent:
            raise refusal(Reason.DRAINING, "the run is over", fix="start ps-server again for another run")
        seat, old_seat = self.membership.join(rank, previous)
        if old_seat is not None:
            old = self.workers.pop(seat.rank)
            old.refuse(replaced(seat.rank, old_seat.incarnation))
            self._perform(self.policy.left(seat.rank, self._now()))
            log.warning("replaced", rank=seat.rank, incarnation=old_seat.incarnation, by=seat.incarnation)
        stats = self.stats.setdefault(seat.rank, WorkerStats(seat.rank))
        stats.num_joins += 1
        worker = Worker(seat, stats)
        self.workers[seat.rank] = worker
        log.info("joined", rank=seat.rank, incarnation=seat.incarnation, **where)
        return worker

    def offer(self, worker: Worker, layout: Layout, optimizer: OptimizerSpec) -> None:
        """A worker says what it trains. The first one's model and optimizer are the run's."""
        if self.layout is None:
            if self.policy.contribution == "gradient":
                find_optimizer(optimizer.name)
            self.layout, self.optimizer = layout, optimizer
            log.info("model", tensors=len(layout.specs), parameters=layout.num_parameters, optimizer=optimizer.name)
        else:
            self._check_same(worker, layout, optimizer)
        worker.state = "waiting"
        if self.store is not None:
            self._enter(worker)
        elif self._bringer is None:
            self._ask_for_weights(worker)

    def _check_same(self, worker: Worker, layout: Layout, optimizer: OptimizerSpec) -> None:
        assert self.layout is not None and self.optimizer is not None
        if layout.fingerprint != self.layout.fingerprint:
            lines = "; ".join(self.layout.differences(layout))
            raise refusal(
                Reason.MODEL_MISMATCH,
                f"the model of rank {worker.rank} differs from the run's: {lines}",
                fix="give every worker the same task, task arguments and code",
            )
        differences = self.optimizer.differences(optimizer)
        if differences:
            raise refusal(
                Reason.OPTIMIZER_MISMATCH,
                f"the optimizer of rank {worker.rank} differs from the run's: {'; '.join(differences[:5])}",
                fix="the first worker's optimizer is the run's: give every worker the same one",
            )

    def _ask_for_weights(self, worker: Worker) -> None:
        self._bringer = worker
        worker.state = "uploading"
        worker.outbox.put_nowait(SendWeights())

    def initialise(self, worker: Worker, weights: torch.Tensor) -> None:
        """The initial weights have come, uint8 [total_bytes]: build the store and let everyone in."""
        assert self.layout is not None and self.optimizer is not None
        if self.store is not None or worker is not self._bringer:
            raise refusal(Reason.BAD_REQUEST, "initial weights without having been asked for them")
        optimizer = self.optimizer if self.policy.contribution == "gradient" else None
        options = self.config.store
        self.store = Store(self.layout, weights, optimizer, buffers=options.buffers, polyak=options.polyak)
        self.tensors.size_for(self.layout.exchange_bytes)
        self.staging = StagingPool(self.config.server.max_staged, self.layout.exchange_bytes)
        self.replies = Replies(self.store, self.tensors, self.config.server.max_replies)
        for waiting in list(self.workers.values()):
            if waiting.state in ("waiting", "uploading"):
                self._enter(waiting)

    def _enter(self, worker: Worker) -> None:
        worker.state = "waiting"
        worker.waiting_since = self._now()
        decisions = self.policy.joined(worker.rank, self._now())
        log.info("admitted", rank=worker.rank, step=self.policy.last_step[worker.rank])
        self._perform(decisions)

    # ---- contributions --------------------------------------------------------------------

    def check_contribution(self, worker: Worker) -> Store:
        """The store to stage for; refuses before a byte of the body is taken."""
        if not self.membership.is_current(worker.seat):
            raise replaced(worker.rank, worker.seat.incarnation)
        if worker.state != "computing" or self.store is None:
            raise refusal(Reason.NOT_JOINED, f"rank {worker.rank} has no weights to compute on yet")
        return self.store

    def check_hyperparameters(self, groups: list[Hyperparameters]) -> None:
        """Refuse values of another kind than those the run began with: the optimizer would fail on them."""
        assert self.optimizer is not None
        for index, (known, told) in enumerate(zip(self.optimizer.groups, groups, strict=False)):
            for key, value in told.items():
                expected = known.hyperparameters.get(key)
                if expected is not None and _shape_of(expected) != _shape_of(value):
                    raise refusal(Reason.BAD_REQUEST, f"group {index}: {key} is {value!r}, it was {expected!r}")

    async def contribute(self, worker: Worker, contribution: Contribution, body: torch.Tensor, told: Measured) -> None:
        """Take a whole staged contribution; what comes of it arrives in the worker's outbox."""
        store = self.store
        assert store is not None
        worker.stats.compute_s += told.compute_s
        worker.stats.transfer_s += told.transfer_s
        worker.waiting_since = self._now()
        try:
            is_finite = await self.tensors.run(lambda: store.is_finite(body))
        except asyncio.CancelledError:  # the connection closed: as if the upload had not been whole
            self.staging.give_back(body)
            raise
        if not self.membership.is_current(worker.seat):
            self.staging.give_back(body)
            return
        if not is_finite:
            self.staging.give_back(body)
            self._reject(worker)
            return
        if math.isfinite(told.loss):
            worker.stats.loss = told.loss
        worker.state = "waiting"
        worker.staleness = max(0, self.policy.version - contribution.base_version)
        num_counted = self.policy.last_step.get(worker.rank, 0)
        decisions = self.policy.contributed(worker.rank, contribution, self._now())
        if any(isinstance(decision, Discard) for decision in decisions):
            self.staging.give_back(body)
        else:
            self._staged[worker.rank] = body
        if self.policy.last_step.get(worker.rank, 0) > num_counted:
            lead = self.policy.lead(worker.rank)
            worker.stats.accepted(worker.staleness, contribution.num_samples, lead, self._now())
            self._ended_at = self._now()
        self._perform(decisions)

    def _reject(self, worker: Worker) -> None:
        """NaN or Inf: count it, answer with fresh weights, and end the run when it goes on."""
        limit = self.config.store.max_nonfinite
        worker.stats.rejected += 1
        worker.stats.rejected_in_a_row += 1
        row = worker.stats.rejected_in_a_row
        log.warning("rejected", rank=worker.rank, reason="NaN or Inf in the contribution", in_a_row=row, limit=limit)
        if row >= limit:
            self.fail(
                DivergedError(
                    f"rank {worker.rank} sent {row} contributions with NaN or Inf in a row (store.max_nonfinite is "
                    f"{limit}); the weights are still finite, at version {self.policy.version}",
                    fix="lower --lr, clip gradients, or look at the rank's data",
                    reason=Reason.DIVERGED,
                )
            )
            return
        self._go(worker, "REJECTED", "NaN or Inf in the contribution: nothing folded")

    # ---- carrying out decisions -----------------------------------------------------------

    def _perform(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Fold(rank, weight):
                    self._fold(rank, weight)
                case Commit(ranks, reason):
                    log.debug("commit", version=self.policy.version, ranks=ranks, reason=reason)
                    self._commit(ranks)
                case Answer(rank, outcome, reason):
                    self.tensors.then(partial(self._go, self.workers[rank], outcome.name, reason))
                case Refuse(rank, kind, reason):
                    if rank in self.workers:
                        self.workers[rank].refuse(refusal(Reason[kind], reason))
        if self.store is not None:
            self.staging.look_again()  # also without decisions: who left may have been folded before others

    def _fold(self, rank: int, weight: float) -> None:
        store, body = self.store, self._staged.pop(rank)
        assert store is not None

        def folded(reusable: torch.Tensor | None) -> None:
            if reusable is None:
                self.staging.donate()
            else:
                self.staging.give_back(reusable)

        self.tensors.submit(lambda: store.fold(body, weight, rank), folded)

    def _commit(self, ranks: tuple[int, ...]) -> None:
        store = self.store
        assert store is not None
        live = sorted(self.policy.members)
        # In a round everyone steps under one schedule; the lowest rank's word counts.
        told = [self.workers[rank].hyperparameters for rank in sorted(ranks) if rank in self.workers]
        hyperparameters = next((h for h in told if h is not None), None)
        lowest = live[0] if live else 0
        self.tensors.submit(lambda: store.commit(len(live), lowest, hyperparameters), self.staging.reclaim)

    def _go(self, worker: Worker, outcome: str, reason: str) -> None:
        """Everything decided before has been done: the worker may have its answer."""
        assert self.store is not None
        now = self._now()
        if outcome == "DROPPED":
            worker.stats.dropped += 1
        if outcome == "START" and self._started_at is None:
            self._started_at = now
            log.info("training_started", workers=len(self.policy.members), mode=self.config.run.mode)
        held_s = now - worker.waiting_since if worker.waiting_since is not None else 0.0
        if outcome != "START":
            worker.stats.wait_s += held_s
        worker.waiting_since = None
        worker.state = "computing"
        worker.outbox.put_nowait(Go(outcome, self.store.version, worker.staleness, held_s, reason))
        worker.staleness = 0

    # ---- the end --------------------------------------------------------------------------

    def finish(self, worker: Worker, transfer_s: float, can_evaluate: bool) -> None:
        """A worker has taken all its steps; it is told the final weights when all have."""
        worker.stats.transfer_s += transfer_s
        worker.state, worker.can_evaluate = "finished", can_evaluate
        log.info("finished", rank=worker.rank, steps=worker.stats.steps)
        self._end_if_all_finished()

    def _end_if_all_finished(self) -> None:
        live = list(self.workers.values())
        if self._done_sent or not live or any(worker.state != "finished" for worker in live):
            return
        self._done_sent = True
        evaluators = sorted(worker.rank for worker in live if worker.can_evaluate)
        self.tensors.then(lambda: self._send_done(live, evaluators[:1]))

    def _send_done(self, live: list[Worker], evaluators: list[int]) -> None:
        assert self.store is not None
        for worker in live:
            worker.outbox.put_nowait(Done(self.store.version, worker.rank in evaluators))

    def report(self, worker: Worker, metrics: dict[str, float]) -> None:
        """Figures of the final evaluation."""
        self.final.update(metrics)

    def leave(self, worker: Worker, reason: str) -> None:
        """A worker's stream has ended. Harmless when a newer process has its rank."""
        if not self.membership.leave(worker.seat):
            return
        del self.workers[worker.rank]
        event = log.info if reason == "said goodbye" else log.warning
        event("left", rank=worker.rank, incarnation=worker.seat.incarnation, reason=reason)
        if self._bringer is worker and self.store is None:
            self._bringer = None
            heirs = [w for w in self.workers.values() if w.state == "waiting"]
            if heirs:
                self._ask_for_weights(heirs[0])
        self._perform(self.policy.left(worker.rank, self._now()))
        if not self.workers and (self._done_sent or self.is_any_rank_through()):
            self._resolve(None)
        self._end_if_all_finished()

    def is_any_rank_through(self) -> bool:
        """Some rank has taken all its steps: a script may leave then without a word."""
        return any(self.policy.next_local_steps(rank) == 0 for rank in self.policy.last_step)

    def fail(self, error: BaseException) -> None:
        """End the run with an error; every worker is told."""
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
        """The server stops: every worker is told, so that it need not find out."""
        error = refusal(Reason.DRAINING, "the server is stopping", fix="start ps-server again")
        for worker in self.workers.values():
            worker.refuse(error)

    # ---- time -----------------------------------------------------------------

    def tick(self) -> None:
        """Called every fraction of a second: time-outs, and a sign of life to those who wait."""
        now = self._now()
        if self.store is not None:
            self._perform(self.policy.tick(now))
        if now - self._said_waiting_at < _SAY_WAITING_S:
            return
        self._said_waiting_at = now
        reasons = self.policy.waiting()
        for worker in self.workers.values():
            if worker.state in ("waiting", "finished") and worker.outbox.empty():
                worker.outbox.put_nowait(Waiting(self.waiting_for(worker, reasons)))

    def waiting_for(self, worker: Worker, reasons: dict[int, str]) -> str:
        if worker.state == "finished":
            busy = sorted(other.rank for other in self.workers.values() if other.state != "finished")
            return f"rank {', '.join(map(str, busy))} to finish" if busy else ""
        if worker.state != "waiting":
            return ""
        if self.store is None and self._bringer is not None:
            return f"initial weights from rank {self._bringer.rank}"
        return reasons.get(worker.rank, "")

    def division(self, worker: Worker) -> tuple[int, int]:
        """(num_workers, index): how the data is divided for this worker."""
        if self.config.run.workers is not None:
            return self.config.run.workers, worker.rank
        ranks = self.membership.live_ranks
        return len(ranks), ranks.index(worker.rank) if worker.rank in ranks else 0

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first answer to the last contribution."""
        if self._started_at is None:
            return 0.0
        is_over = self._done_sent or not self.workers
        end = self._ended_at if is_over and self._ended_at is not None else self._now()
        return end - self._started_at


def _shape_of(value: Any) -> Any:
    return [_shape_of(item) for item in value] if isinstance(value, (list, tuple)) else type(value)
