"""Effects of decisions, snapshots, workers that leave, and the end of a run.

    all workers have finished   `_end_if_over`: a last snapshot, then the workers are notified, and leave
    a stop of the server        `_close`: a last snapshot
    an error                    `_fail`: no snapshot

Other files, such as the weights and the summary, are written by `ps/server.py` when the run has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...common.errors import DivergedError, ParamServerError, Reason, UsageError, refusal
from ...common.reporting.curve import Point, metric_fields
from ...common.reporting.metrics import total_or_unknown
from ..policies.base import Decision
from . import effects, events
from .effects import Effect, Log
from .roster import Worker
from .state import RunState, not_json


class Ending(RunState):
    """A run that carries out decisions, releases workers, and ends."""

    def performed(self, decisions: list[Decision], at: float) -> list[Effect]:
        return self._after(self.contributions.perform(decisions, at), at)

    def _after(self, found: list[Effect], at: float) -> list[Effect]:
        """The effects of decisions, with a snapshot where a commit made one due, or with the end of the run."""
        if found and isinstance(end := found[-1], effects.End):
            found += self._close(end.error or stopping(), at)
        may = self.rhythm.is_kept and not self.is_closed and self.policy.has_newest_weights
        if may and not self.policy.is_within_step and self.rhythm.is_due(self.policy.min_steps_done, at):
            found += self._take_snapshot(at)
        return found

    # ---- snapshots ------------------------------------------------------------------------

    def _take_snapshot(self, at: float) -> Iterator[Effect]:
        saved = self.saved(at)
        if wrong := not_json(saved["policy"]):
            message = f"mode {self.options.mode} cannot be saved: {wrong}, which is not the same after it has been JSON"
            fix = "let saved_state return dicts with text as keys, lists, text, finite numbers, booleans and None"
            yield from self._fail(UsageError(message, fix=fix))
            return
        attempt = self.rhythm.begin(self.policy.version, self.policy.min_steps_done, at)
        yield effects.TakeSnapshot(attempt, self.policy.version, saved)

    # ---- workers that leave ---------------------------------------------------------------

    def expel(
        self, worker: Worker, error: ParamServerError, at: float, how: str = "closed", reason: str = ""
    ) -> Iterator[Effect]:
        yield effects.Refuse(worker.rank, worker.incarnation, error)
        yield from self._leave(worker, how, reason or error.message, at)

    def _leave(self, worker: Worker, how: str, reason: str, at: float, exit_code: int = 1) -> Iterator[Effect]:
        """Release a worker: the run no longer waits for it."""
        rank, incarnation = worker.rank, worker.incarnation
        self.roster.remove(worker)
        is_goodbye = how in ("goodbye", "failed")
        self.roster.stats[rank].is_lost = how != "goodbye"
        yield effects.Fence(rank, incarnation, ends_streams=not is_goodbye)
        level = {"goodbye": "routine", "failed": "info"}.get(how, "warning")
        yield Log(level, "left", {"rank": rank, "incarnation": incarnation, "reason": reason})
        yield effects.WorkerLeft(rank, incarnation, how, reason, worker.is_finished)
        if self.is_done and (how == "failed" or (rank == self.asked and not is_goodbye)):
            # The final weights exist, but not their evaluation.
            account = f"failed after the last training step: {reason}"
            if how != "failed":
                account = f"was lost while it evaluated the final weights: {reason}"
            self.ended_by = f"rank {rank} {account}"
            yield self._note_failure(ParamServerError(self.ended_by), rank, exit_code)
        if not self.has_weights:
            yield from self._pass_on(worker)
        elif self.initializer is worker:
            self.initializer = None
        if self.is_closed:
            return
        if rank in self.policy.members:
            if self.policy.is_through(rank):  # it has taken all its steps, so no worker waits for it
                yield from self.performed(self.policy.finished(rank, at), at)
            else:
                yield from self.performed(self.policy.left(rank, at), at)
                if not is_goodbye:
                    self.lost_at[rank] = at
        yield from self._end_if_over(at)

    def _pass_on(self, departed: Worker) -> Iterator[Effect]:
        """Ask another worker for the initial weights when the initializer left; without another, drop the model."""
        if self.initializer is departed:
            self.initializer = None
        if any(worker.model is not None for worker in self.roster.workers.values()):
            yield from self._ask_the_first()
        elif self.model is not None:
            self.model = None
            yield effects.ForgetModel()

    def _ask_the_first(self) -> Iterator[Effect]:
        """Ask rank 0 for the initial weights, as every process of DDP begins with those of rank 0.

        Until training can start, the others wait for it. Without it, ask the lowest rank of those that are to start.
        """
        workers, num_expected = self.roster.workers, self.policy.common.num_workers or 0
        if self.initializer is not None or (0 not in workers and len(workers) < num_expected):
            return
        offered = [worker for _, worker in sorted(workers.items()) if worker.model is not None]
        if offered and (not offered[0].rank or len(offered) >= num_expected):
            self.initializer = offered[0]
            yield effects.AskForWeights(offered[0].rank, offered[0].incarnation)

    # ---- the end --------------------------------------------------------------------------

    def _finished(self, worker: Worker, event: events.Finished) -> Iterator[Effect]:
        """The worker takes no more training steps, and receives the final weights when all have finished.

        A worker that has not taken all its steps, and does not know that the run is stopped, is out: it keeps its rank,
        and the run does not wait for its contributions."""
        rank, stats, policy = worker.rank, self.roster.stats[worker.rank], self.policy
        self.has_finished = True
        stats.transfer_s += event.transfer_s
        stats.note_residual(event.residual)
        self.roster.num_finished += not worker.is_finished
        worker.is_finished, worker.stays, worker.waiting_since = True, event.stays, None
        yield Log("routine", "finished", {"rank": worker.rank, "steps": policy.steps_done(rank)})
        if rank in policy.members and not self.is_closed and (policy.is_stopping or not policy.is_through(rank)):
            yield effects.WorkerLeft(rank, worker.incarnation, "finished", "")
            yield from self.performed(policy.finished(rank, event.at), event.at)
        if self.is_done:  # it lost its connection while it was notified
            yield effects.TellDone(((rank, worker.incarnation),), self.asked, policy.version)
        yield from self._end_if_over(event.at)

    def _stop_asked(self, worker: Worker, event: events.StopAsked) -> Iterator[Effect]:
        """The next reply of every worker is the last. Only the first request counts."""
        if self.policy.is_stopping or self.is_done:
            return
        yield Log("info", "run_stopped", {"rank": worker.rank, "reason": event.reason, "version": self.policy.version})
        yield from self.stop(f"stopped by rank {worker.rank}: {event.reason}", event.at)

    def _note_failure(self, error: ParamServerError, rank: int | None, exit_code: int, **fields: object) -> Effect:
        self.failure, error.exit_code = error, exit_code
        return Log("error", "run_failed", {"rank": rank, "reason": error.message, "exit_code": exit_code, **fields})

    def stop(self, ended_by: str, at: float) -> Iterator[Effect]:
        self.ended_by = ended_by
        yield from self.performed(self.policy.stopped(at), at)

    def _end_if_over(self, at: float) -> Iterator[Effect]:
        """End the run when all workers have finished, including those lost a moment ago that may come back."""
        roster = self.roster
        if self.is_closed or (roster.workers and (self.is_done or roster.num_finished < len(roster.workers))):
            return  # the cheap checks come first: this runs at every tick
        if roster.workers and self.has_weights and not self.policy.has_newest_weights:
            yield from self._ask_for_newest("the loops of all workers have ended")
            return
        if not self.is_done and self.absent(at):
            return
        if not roster.workers:
            # The script of a rank that has taken all its training steps may leave without a goodbye.
            is_through = self.is_done or self.has_finished or any(map(self.policy.is_through, self.policy.rows))
            if roster.processes and is_through:
                yield from self.performed(self.policy.last_commit(), at)
                self.is_closed = True
                yield effects.End(self.failure)
            return
        yield from self.performed(self.policy.last_commit(), at)
        if self.has_weights and self.rhythm.wants_last(self.policy.version):
            # Once a worker has left, its work cannot be repeated.
            if not self.rhythm.is_writing:
                yield from self._take_snapshot(at)
            return
        self.is_done = True
        live = list(roster.workers.values())
        able = [worker.rank for worker in live if worker.stays and self.failure is None and self.may_ask]
        self.asked = min(able, default=None)
        recipients = tuple((worker.rank, worker.incarnation) for worker in live)
        yield effects.TellDone(recipients, self.asked, self.policy.version)

    def _ask_for_newest(self, why_nobody: str) -> Iterator[Effect]:
        """Ask one of the finished workers for the newest weights. A snapshot would lack the optimizer's state."""
        if self.initializer is not None:
            return
        workers, holders = self.roster.workers, sorted(self.policy.newest_holders)
        having = [workers[rank] for rank in holders if rank in workers and not workers[rank].is_away]
        if having and not self.rhythm.keeps_optimizer:
            self.initializer = having[0]
            yield effects.AskForWeights(having[0].rank, having[0].incarnation)
        elif not any(rank in workers for rank in holders) or self.rhythm.keeps_optimizer:
            problem = f"the weights of version {self.policy.version} are not here, and {why_nobody}"
            yield from self._fail(ParamServerError(problem, fix=self.rhythm.to_continue))

    def _close(self, error: ParamServerError, at: float) -> Iterator[Effect]:
        """Close the run, so that nothing more is decided: the last workers to leave must not close a round alone."""
        self.is_closed, self.rhythm.needs_final = True, False
        for worker in self.roster.workers.values():
            yield effects.Refuse(worker.rank, worker.incarnation, error)
        has_newest = self.has_weights and self.policy.has_newest_weights
        if has_newest and not self.rhythm.is_writing and self.rhythm.wants_last(self.policy.version):
            yield from self._take_snapshot(at)

    def _failed(self, event: events.Failed) -> Iterator[Effect]:
        """Something outside of the run failed; its state must not go into a snapshot."""
        is_diverged = event.exit_code == DivergedError.exit_code
        kind, reason = (DivergedError, Reason.DIVERGED) if is_diverged else (ParamServerError, None)
        error = kind(event.message, fix=event.fix, reason=reason)
        error.exit_code = event.exit_code
        yield from self._fail(error)

    def _fail(self, error: ParamServerError) -> Iterator[Effect]:
        """End the run with an error, and without a snapshot."""
        self.is_closed = True
        self.rhythm.is_kept = self.rhythm.is_writing = False
        for worker in self.roster.workers.values():
            yield effects.Refuse(worker.rank, worker.incarnation, error)
        yield effects.End(error)


def stopping() -> ParamServerError:
    return refusal(Reason.DRAINING, "the server is stopping", fix="start ps-server again")


# ---- evaluation -----------------------------------------------------------------------------------
# Metrics of evaluations: whose count, the curve that they make, and how they end a run.


class Evaluating(Ending):
    """A run that takes the metrics of the worker, or of the process outside of it, that it asked for them."""

    def _metrics_received(self, event: events.MetricsReceived) -> Iterator[Effect]:
        """Take an evaluation during the run. Its metrics may stop the run; a failed evaluation ends it."""
        if self.is_closed or self.is_done or event.version > self.policy.version:
            return  # too late, or from before the run went back
        worker = None if event.rank is None else self.roster.workers.get(event.rank)
        if event.rank is not None and (worker is None or not worker.num_asked):
            reason = "the server did not ask this rank; it asks the evaluator process, or else the lowest rank"
            yield Log("warning", "metrics_ignored", {"rank": event.rank, "reason": reason})
        elif event.failure:
            if self.failure is None:
                source = "the evaluator" if event.rank is None else f"rank {event.rank}"
                message = f"{source} failed in the evaluation at step {event.step}: {event.failure}"
                yield self._note_failure(ParamServerError(message), event.rank, event.exit_code)
                yield from self.stop(message, event.at)
        elif all(point.version != event.version for point in self.curve.points):
            yield from self._measured(event.step, event.metrics, event.at, event.version)
            why = self.curve.why_enough
            if why and not self.policy.is_stopping:
                yield Log("info", "run_stopped", {"reason": why, "version": self.policy.version})
                yield from self.stop(f"stopped: {why}", event.at)

    def _left(self, worker: Worker, event: events.Left) -> Iterator[Effect]:
        """Release a worker that is gone. Of the one that was asked, the goodbye has metrics of the final weights."""
        if event.metrics and worker.rank != (self.asked if self.is_done else min(self.roster.workers)):
            reason = "another worker evaluates the final weights"
            yield Log("warning", "metrics_ignored", {"rank": worker.rank, "reason": reason})
        elif event.metrics:
            self.final |= event.metrics
            if self.is_done:
                yield from self._measured(self.policy.min_steps_done, event.metrics, event.at, None)
        yield from self._leave(worker, event.how, event.reason, event.at, event.exit_code)

    def _measured(self, step: int, metrics: dict[str, float], at: float, version: int | None) -> Iterator[Effect]:
        """Yields the effects of an evaluation of this version; None: the final one, perhaps evaluated before."""
        policy, curve = self.policy, self.curve
        of_version = policy.version if version is None else version
        if curve.points and curve.points[-1].version == of_version:
            return
        elapsed_s = round(self.contributions.elapsed_s(at, self.has_training_ended), 3)
        samples = total_or_unknown([policy.row(rank).samples for rank in policy.rows])
        point = Point(step=step, version=of_version, elapsed_s=elapsed_s, metrics=metrics, samples=samples)
        is_best = curve.add(point)
        yield effects.MetricsTaken(point, is_best)
        if version is not None:
            fields = {"step": step, "version": of_version, "best": is_best, **metric_fields(point.metrics)}
            yield Log("info", "evaluated", fields)
        if len(curve.points) > 1:
            return
        why, fix = curve.unclear()
        wants_best = self.options.patience is not None or self.options.best is not None
        if why and version is not None and self.failure is None and wants_best:
            message = f"run.patience and run.best need a best evaluation; {why}"
            error = UsageError(message, fix=fix)
            yield self._note_failure(error, None, error.exit_code, step=step, fix=fix)
            yield from self.stop(message, at)
        elif why:
            yield Log("info", "no_best", {"reason": why, "fix": fix})
        if lacks := curve.lacks():
            yield Log("warning", "no_such_metric", {"reason": lacks})
