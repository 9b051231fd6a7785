"""The run: `apply(event) -> effects`. Holds policy, roster, leases, counters and contributions, and no clock.

Same events, same state, same effects, on every shard: so history, replay, simulation and several shards are one
mechanism, and a bug report is a list of events. What a contribution leads to is in `contributions.py`. An exception in
here is a mistake of ours: the run ends, and what it holds is no state to take a snapshot of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...common.errors import DivergedError, ParamServerError, Reason, UsageError, refusal
from ...common.reporting.curve import Curve, Point
from ...common.reporting.metrics import total_or_unknown
from ..policies.base import Decision, Policy
from . import controls, effects, events, saving
from .contributions import Contributions
from .counting.length import Length
from .effects import Effect, Log
from .roster import Roster, Worker, replaced
from .snapshot_rhythm import Rhythm


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is told, of its configuration."""

    mode: str = ""
    num_workers: int | None = None
    max_workers: int = 1024  # where num_workers is None
    lease_s: float = 5.0
    absent_s: float = 15.0  # how long the end waits for a rank that was lost before its last training step
    max_rejected: int = 10  # contributions of one worker in a row that end the run
    keeps_snapshots: bool = False
    best: str | None = None  # the metric that decides
    keeps_best: bool = False  # the weights of the best evaluation
    stop_when: str | None = None
    patience: int | None = None
    epochs: int | None = None  # that the run is long; how many training steps that is, workers say
    every_steps: int | None = None  # training steps between two snapshots
    every_s: float | None = None
    policy_of: Callable[[str], Policy] | None = None  # of another mode, as configured; UsageError where it cannot be
    waits_for_first_snapshot: bool = False  # several shards: one lost before the first would be the end


class Run:
    """One run from the first join to the final weights. `name` and `incarnation` (of the server) identify it."""

    def __init__(self, options: Options, policy: Policy, name: str, incarnation: int = 1) -> None:
        self.options = options
        self.mode = options.mode
        self.policy = policy
        self.name = name
        self.incarnation = incarnation
        self.roster = Roster(options.num_workers, options.max_workers, options.lease_s)
        self.rhythm = Rhythm(options.keeps_snapshots, options.every_steps, options.every_s)
        self.contributions = Contributions(policy, self.roster, options.mode, options.max_rejected)
        self.model: tuple[str, str] | None = None  # what all workers train: names of model and optimizer
        self.may_change_optimizer = False  # the first worker of a run that goes on says what its numbers are
        self.has_weights = False
        self.initializer: Worker | None = None  # of the initial weights
        self.is_holding = False  # everyone waits for the first snapshot on all shards
        self.is_closed = False  # nothing is applied any more
        self.is_done = False  # everyone has been told that the run is over
        self.evaluator: int | None = None  # whose word on the final weights is waited for then
        self.has_finished = False  # some worker takes no more steps
        self.ended_by = ""  # who stopped it and why, or what failed; empty: all steps were taken
        self.failure: ParamServerError | None = None  # of a worker, after the last training step
        self.final: dict[str, float] = {}
        self.curve = Curve(options.best, options.stop_when, options.patience)  # of evaluations during the run
        self.length = Length(policy, options.epochs)
        # Options that were set while it ran, by name: the configured value, and the one that was set.
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.lost_at: dict[int, float] = {}  # by rank, before its last training step
        self._happens = self._handlers()

    # ---- one event ------------------------------------------------------------------------

    def apply(self, event: events.Event) -> list[Effect]:
        """What happens changes the state; what is to be done about it is returned, in order."""
        found = self._happens[type(event)](event)
        return found if isinstance(found, list) else list(found)

    def _handlers(self) -> dict[type[events.Event], Callable[[Any], Iterable[Effect]]]:
        """By kind of event, what it leads to."""
        of_a_worker: dict[type[events.Event], Callable[..., Iterable[Effect]]] = {
            events.AskedAgain: self._asked_again,
            events.Disconnected: self._disconnected,
            events.Left: self._left,
            events.Expelled: self._expelled,
            events.Offered: self._offered,
            events.Brought: self._brought,
            events.Finished: self._finished,
            events.StopAsked: self._stop_asked,
        }
        return {
            events.Contributed: self._contributed,
            **{kind: partial(self._of_a_worker, follows) for kind, follows in of_a_worker.items()},
            events.Joined: self._joined,
            events.HeartbeatBegan: self._heartbeat_began,
            events.HeartbeatStopped: self._heartbeat_stopped,
            events.Heard: self._heard,
            events.MetricsReceived: self._metrics_received,
            events.CopyAsked: self._copy_asked,
            events.Measured: lambda event: [effects.Clip(event.version, event.norm)],
            events.Stored: self._stored,
            events.Controlled: partial(controls.follow, self),
            events.Ticked: self._ticked,
            events.Stopped: lambda event: self._close(_stopping(), event.at),
            events.Failed: self._failed,
        }

    def _of_a_worker(self, follows: Callable[..., Iterable[Effect]], event: events.OfAWorker) -> Iterable[Effect]:
        worker = self.roster.find(event.rank, event.incarnation)
        if worker is None or (self.is_closed and isinstance(event, _BEFORE_THE_END)):
            return ()  # it was let go, or a newer process has its rank, or the run has ended: it has been told
        if not isinstance(event, events.Disconnected | events.Left):
            self.roster.spoke(worker, event.at)
        return follows(worker, event)

    def _left(self, worker: Worker, event: events.Left) -> Iterator[Effect]:
        metrics = event.metrics
        if metrics and worker.rank != (self.evaluator if self.is_done else min(self.roster.workers)):
            metrics = {}
            yield _ignored(worker.rank, "another worker evaluates the final weights")
        self.final |= metrics
        if self.is_done and metrics:
            yield from self._evaluated(self.policy.min_steps_done, metrics, event.at)
        yield from self._leave(worker, event.how, event.reason, event.at, event.exit_code)

    def _expelled(self, worker: Worker, event: events.Expelled) -> Iterator[Effect]:
        return self.expel(worker, refusal(Reason[event.reason], event.message), event.at)

    def _heartbeat_began(self, event: events.HeartbeatBegan) -> Iterator[Effect]:
        self.roster.heartbeats[event.process] += 1
        if event.evaluates:
            self.roster.evaluators.add(event.process)
            yield Log("info", "evaluator", {"meaning": "a process that does not train evaluates"})

    def _heartbeat_stopped(self, event: events.HeartbeatStopped) -> Iterable[Effect]:
        gone = self.roster.heartbeat_stopped(event.process)
        return () if gone is None else self._leave(gone, "closed", "connection lost", event.at)

    def _heard(self, event: events.Heard) -> Iterable[Effect]:
        self.roster.heard(event.rank, event.process, event.at)
        return ()

    def _copy_asked(self, event: events.CopyAsked) -> Iterable[Effect]:
        return [effects.KeepWeights(self.policy.version)] if self.has_weights else ()

    # ---- a worker's way in ----------------------------------------------------------------

    def _joined(self, joined: events.Joined) -> Iterator[Effect]:
        may_resume = self._may_resume(joined)
        try:
            self._check_join(joined, may_resume)
            worker, old = self.roster.seat(joined)
        except ParamServerError as error:
            yield effects.NotSeated(joined.stream, error)
            return
        self.lost_at.pop(worker.rank, None)
        if old is not None:
            if may_resume:
                worker.goes_on_from(old)
            yield from self._displace(old, worker, joined.at)
        number = self.policy.num_counted.get(worker.rank, 0)
        yield effects.Seated(joined.stream, worker.rank, worker.incarnation, may_resume, number)

    def _check_join(self, joined: events.Joined, may_resume: bool) -> None:
        if joined.run and joined.run != self.name:
            raise refusal(
                Reason.RUN_MISMATCH,
                f"this worker belongs to run {joined.run}, the server runs {self.name}: it was started anew",
                fix="start the worker again to join the new run",
            )
        if self.is_closed:
            raise _stopping()
        if self.is_done and not may_resume:
            raise refusal(Reason.DRAINING, "the run is over", fix="start ps-server again for another run")

    def _may_resume(self, joined: events.Joined) -> bool:
        """The process lost a connection and nothing else, perhaps before it heard of its newest incarnation: it goes on
        where it was."""
        known = self.roster.workers.get(joined.rank) if joined.rank is not None else None
        if known is None or joined.server_incarnation != self.incarnation or not self._has_place(known):
            return False
        is_same = joined.process == known.process != "" and 0 < joined.incarnation < known.incarnation
        return is_same or joined.incarnation == known.incarnation

    def _has_place(self, worker: Worker) -> bool:
        """It may come back to it after a lost connection."""
        return worker.rank in self.policy.members or worker.is_finished

    def _displace(self, old: Worker, new: Worker, at: float) -> Iterator[Effect]:
        """An older stream or process of a rank is told that it was replaced."""
        yield effects.Refuse(old.rank, old.incarnation, replaced(old.rank, old.incarnation))
        yield effects.Fence(old.rank, old.incarnation)
        if new.is_resumed:
            self.policy.disconnected(new.rank)
            return
        yield effects.WorkerLeft(old.rank, old.incarnation, "replaced", "")
        yield Log("warning", "replaced", {"rank": old.rank, "incarnation": old.incarnation, "by": new.incarnation})
        if not self.has_weights:
            yield from self._pass_on(old)
        yield from self.performed(self.policy.left(old.rank, at), at)

    def _offered(self, worker: Worker, event: events.Offered) -> Iterator[Effect]:
        """Every shard knows what it trains. The first one's model and optimizer are the run's."""
        worker.model, worker.rendezvous = (event.model, event.optimizer), event.rendezvous
        if self.model != worker.model:
            if self.model is not None and (self.model[0] != event.model or not self.may_change_optimizer):
                what = "model" if self.model[0] != event.model else "optimizer"
                reason = Reason.MODEL_MISMATCH if what == "model" else Reason.OPTIMIZER_MISMATCH
                message = f"the {what} of rank {worker.rank} differs from the run's, which is that of its first worker"
                yield from self.expel(worker, refusal(reason, message), event.at)
                return
            self.model = worker.model
            yield effects.Adopt(worker.rank, worker.incarnation)
        self.may_change_optimizer = False
        if worker.is_resumed:
            worker.is_away = False
            yield Log("info", "resumed", {"rank": worker.rank, "step": self.policy.num_counted[worker.rank]})
        elif not self.is_holding:
            if self.has_weights:
                yield from self._enter(worker, event.at)
            elif self.initializer is None:
                yield self._ask_for_weights(worker)

    def _ask_for_weights(self, worker: Worker) -> Effect:
        self.initializer = worker
        return effects.AskForWeights(worker.rank, worker.incarnation)

    def _brought(self, worker: Worker, event: events.Brought) -> Iterator[Effect]:
        if worker is not self.initializer or self.has_weights:
            error = refusal(Reason.BAD_REQUEST, "initial weights without having been asked for them")
            yield from self.expel(worker, error, event.at)
            return
        self.has_weights, self.initializer = True, None
        yield effects.Begin(worker.rank, worker.incarnation)
        if self.rhythm.is_kept:  # who goes on from nothing would be another run
            yield from self._take_snapshot(event.at)
        self.is_holding = self.rhythm.is_writing and self.options.waits_for_first_snapshot
        if not self.is_holding and not self.is_closed:
            yield from self._enter_all(event.at)

    def _enter_all(self, at: float) -> Iterator[Effect]:
        self.is_holding = False
        for worker in list(self.roster.workers.values()):
            if worker.has_offered and worker.rank not in self.policy.members:
                yield from self._enter(worker, at)

    def _enter(self, worker: Worker, at: float) -> Iterator[Effect]:
        """Let a worker in; its reply comes when the mode allows it to start."""
        if self.policy.is_stopping:
            yield from self.expel(worker, refusal(Reason.DRAINING, f"the run is over: {self.ended_by}"), at)
            return
        if not self.policy.members and not self.policy.has_newest_weights:
            yield from self._fail(self._without_weights("all workers that had the newest are gone"))
            return
        worker.waiting_since = at
        decisions = self.policy.joined(worker.rank, at)
        yield Log("routine", "admitted", {"rank": worker.rank, "step": self.policy.num_counted[worker.rank]})
        yield from self.performed(decisions, at)

    def _without_weights(self, what: str) -> ParamServerError:
        return ParamServerError(
            f"the weights of version {self.policy.version} are not here, and {what}",
            fix="keep snapshots (--checkpoint-dir) to go on from; give the run as many --steps as its loops take",
        )

    # ---- contributions --------------------------------------------------------------------

    def _contributed(self, event: events.Contributed) -> Iterable[Effect]:
        worker = self.roster.find(event.rank, event.incarnation)
        if worker is None or self.is_closed:
            return self.contributions.refuse(event)
        self.roster.spoke(worker, event.at)
        if worker.rank not in self.policy.members:
            error = refusal(Reason.NOT_JOINED, f"rank {worker.rank} has no weights to compute on yet")
            return [*self.contributions.refuse(event), *self.expel(worker, error, event.at)]
        first = event.contribution.first
        told = list(self.length.told(worker.rank, first.run_steps)) if first is not None and first.run_steps else []
        found = self._after(self.contributions.taken(worker, event), event.at)
        return told + found if told else found

    def _asked_again(self, worker: Worker, event: events.AskedAgain) -> Iterable[Effect]:
        seq, counted = event.seq, self.policy.num_counted.get(worker.rank, 0)
        if worker.rank not in self.policy.members or seq != counted:
            what = f"rank {worker.rank} asks again about contribution {seq}; the last that counts is {counted}"
            return self.expel(worker, refusal(Reason.STEP_GAP, what), event.at)
        return self._after(self.contributions.asked_again(worker, event), event.at)

    def take_over(self, mode: str, policy: Policy, at: float) -> list[Effect]:
        """Another mode of the same compatible_modes holds from here on."""
        decisions = policy.take_over(self.policy, at)
        self.mode, self.policy = mode, policy
        self.contributions.policy = self.length.policy = policy
        return self.performed(decisions, at)

    def performed(self, decisions: list[Decision], at: float) -> list[Effect]:
        return self._after(self.contributions.perform(decisions, at), at)

    def _after(self, found: list[Effect], at: float) -> list[Effect]:
        """What was decided, and a snapshot where a commit made one due, or the end where it is one."""
        for effect in found:
            if type(effect) not in _LOOKED_AT:
                continue
            if isinstance(effect, effects.Commit):
                self.rhythm.committed()
            elif isinstance(effect, effects.SendReply):
                if (group := effect.reply.group) is not None and group.members[:1] == (effect.rank,):
                    uploads = group.uploads_weights or self.rhythm.is_due(lambda: self._min_steps_done() + 1, at)
                    group = replace(group, uploads_weights=uploads, uploads_optimizer=self.rhythm.is_kept)
                    effect.reply = replace(effect.reply, group=group)
            elif isinstance(effect, effects.End):  # nothing comes after it
                found += self._close(effect.error or _stopping(), at)
                break
        may = self.rhythm.is_kept and not self.is_closed and self.policy.has_newest_weights
        if may and self.rhythm.is_due(self._min_steps_done, at):
            found += self._take_snapshot(at)
        return found

    def _min_steps_done(self) -> int:
        return self.policy.min_steps_done

    # ---- snapshots ------------------------------------------------------------------------

    def _take_snapshot(self, at: float) -> Iterator[Effect]:
        saved = self.saved(at)
        if wrong := saving.not_json(saved["policy"]):
            message = f"mode {self.options.mode} cannot be saved: {wrong}, which is not the same after it has been JSON"
            fix = "let saved_state return dicts with text as keys, lists, text, finite numbers, booleans and None"
            yield from self._fail(UsageError(message, fix=fix))
            return
        attempt = self.rhythm.begin(self.policy.version, self.policy.min_steps_done, at)
        yield effects.TakeSnapshot(attempt, self.policy.version, saved)

    def _stored(self, event: events.Stored) -> Iterator[Effect]:
        """All shards are through with an attempt."""
        if not self.rhythm.ended(event.attempt, event.durable):
            return
        yield effects.Prune(self.rhythm.durable_version)
        if self.is_closed:
            if self.has_weights and self.rhythm.wants_last(self.policy.version):
                yield from self._take_snapshot(event.at)
            return
        if self.is_holding:
            yield from self._enter_all(event.at)
        yield from self._end_if_over(event.at)

    # ---- who goes -------------------------------------------------------------------------

    def _disconnected(self, worker: Worker, event: events.Disconnected) -> Iterator[Effect]:
        """Its stream broke off. While its heartbeat heartbeats it may come back to where it was."""
        if not (worker.process in self.roster.heartbeats and self._has_place(worker)):
            yield from self._leave(worker, "closed", event.reason, event.at)
            return
        worker.is_away = True
        self.policy.disconnected(worker.rank)
        yield effects.Fence(worker.rank, worker.incarnation)
        yield Log("warning", "away", {"rank": worker.rank, "incarnation": worker.incarnation, "reason": event.reason})

    def expel(self, worker: Worker, error: ParamServerError, at: float) -> Iterator[Effect]:
        yield effects.Refuse(worker.rank, worker.incarnation, error)
        yield from self._leave(worker, "closed", error.message, at)

    def _leave(self, worker: Worker, how: str, reason: str, at: float, exit_code: int = 1) -> Iterator[Effect]:
        """A worker is gone, and nobody waits for it."""
        rank, incarnation = worker.rank, worker.incarnation
        self.roster.remove(worker)
        is_goodbye = how in ("goodbye", "failed")
        yield effects.Fence(rank, incarnation, ends_streams=not is_goodbye)
        level = {"goodbye": "routine", "failed": "info"}.get(how, "warning")
        yield Log(level, "left", {"rank": rank, "incarnation": incarnation, "reason": reason})
        yield effects.WorkerLeft(rank, incarnation, how, reason)
        if self.is_done and (how == "failed" or (rank == self.evaluator and not is_goodbye)):
            yield from self._failed_at_the_end(rank, how, reason, exit_code)
        if not self.has_weights:
            yield from self._pass_on(worker)
        if self.is_closed:
            return
        was_member = rank in self.policy.members
        yield from self.performed(self.policy.left(rank, at), at)
        if was_member and not is_goodbye and not self.policy.is_through(rank):
            self.lost_at[rank] = at
        yield from self._end_if_over(at)

    def _pass_on(self, gone: Worker) -> Iterator[Effect]:
        """Who was to bring the weights may be gone: another one brings them, or the model is nobody's."""
        heirs = [worker for worker in self.roster.workers.values() if worker.has_offered]
        if self.initializer is gone:
            self.initializer = None
            if heirs:
                yield self._ask_for_weights(heirs[0])
        if not heirs and self.model is not None:
            self.model = None
            yield effects.ForgetModel()

    # ---- the end --------------------------------------------------------------------------

    def _finished(self, worker: Worker, event: events.Finished) -> Iterator[Effect]:
        """It takes no more training steps, and is told the final weights when nobody does. One that has not taken all,
        or not heard that the run is stopped, is out: it keeps its seat, and nobody waits for what it contributes."""
        rank, stats, policy = worker.rank, self.roster.stats[worker.rank], self.policy
        self.has_finished = True
        stats.transfer_s += event.transfer_s
        stats.note_residual(event.residual)
        self.roster.finished(worker)
        worker.can_evaluate, worker.waiting_since = event.can_evaluate, None
        yield Log("routine", "finished", {"rank": worker.rank, "steps": stats.training_steps})
        if rank in policy.members and not self.is_closed and (policy.is_stopping or not policy.is_through(rank)):
            yield effects.WorkerLeft(rank, worker.incarnation, "finished", "")
            yield from self.performed(policy.finished(rank, event.at), event.at)
        if self.is_done:  # it lost its connection when it was told
            yield effects.TellDone(((rank, worker.incarnation),), self.evaluator, policy.version)
        yield from self._end_if_over(event.at)

    def _stop_asked(self, worker: Worker, event: events.StopAsked) -> Iterator[Effect]:
        """Everyone's next reply is the last; the first word counts."""
        if self.policy.is_stopping or self.is_done:
            return
        yield Log("info", "run_stopped", {"rank": worker.rank, "reason": event.reason, "version": self.policy.version})
        yield from self.stop(f"stopped by rank {worker.rank}: {event.reason}", event.at)

    def stop(self, ended_by: str, at: float) -> Iterator[Effect]:
        self.ended_by = ended_by
        yield from self.performed(self.policy.stopped(at), at)

    def _metrics_received(self, event: events.MetricsReceived) -> Iterator[Effect]:
        """An evaluation during the run: its metrics may be enough, and one that fails is the end."""
        if self.is_closed or self.is_done or event.version > self.policy.version:
            return  # too late, or of a run that went back
        if event.rank is not None and not self._is_asked(event.rank):
            yield _ignored(
                event.rank, "the server did not ask this rank; it asks the evaluator process, or else the lowest rank"
            )
        elif event.failure:
            yield from self._evaluation_failed(event)
        elif all(point.version != event.version for point in self.curve.points):
            yield from self._evaluated(event.step, event.metrics, event.at, event.version)
            why = self.curve.why_enough
            if why and not self.policy.is_stopping:
                yield Log("info", "run_stopped", {"reason": why, "version": self.policy.version})
                yield from self.stop(f"stopped: {why}", event.at)

    def _is_asked(self, rank: int) -> bool:
        worker = self.roster.workers.get(rank)
        return worker is not None and worker.num_asked > 0

    def _evaluated(
        self, step: int, metrics: dict[str, float], at: float, version: int | None = None
    ) -> Iterator[Effect]:
        """Of this version, or of the final one, which may have been evaluated before."""
        of = self.policy.version if version is None else version
        if self.curve.points and self.curve.points[-1].version == of:
            return
        elapsed_s = round(self.contributions.elapsed_s(at, self.is_over), 3)
        samples = total_or_unknown([stats_entry.known_samples for stats_entry in self.roster.stats.values()])
        is_best = self.curve.add(Point(step=step, version=of, elapsed_s=elapsed_s, metrics=metrics, samples=samples))
        yield effects.Evaluated(of, step, elapsed_s, metrics, is_best, samples)
        if version is not None:
            yield Log("info", "evaluated", {"step": step, "version": of, "best": is_best, **metrics})
        if (lacks := self.curve.lacks()) and len(self.curve.points) == 1:
            yield Log("warning", "no_such_metric", {"reason": lacks})

    def _evaluation_failed(self, event: events.MetricsReceived) -> Iterator[Effect]:
        if self.failure is not None:
            return
        who = "the evaluator" if event.rank is None else f"rank {event.rank}"
        self.failure = ParamServerError(f"{who} failed in the evaluation at step {event.step}: {event.failure}")
        self.failure.exit_code = event.exit_code
        told = {"rank": event.rank, "reason": self.failure.message, "exit_code": event.exit_code}
        yield Log("error", "run_failed", told)
        yield from self.stop(self.failure.message, event.at)

    def _failed_at_the_end(self, rank: int, how: str, reason: str, exit_code: int) -> Iterator[Effect]:
        """The run has its weights and not what was to come of them."""
        what = f"failed after the last training step: {reason}"
        if how != "failed":
            what = f"was lost while it evaluated the final weights: {reason}"
        self.failure = ParamServerError(f"rank {rank} {what}")
        self.failure.exit_code = exit_code
        self.ended_by = self.failure.message
        yield Log("error", "run_failed", {"rank": rank, "reason": self.ended_by, "exit_code": exit_code})

    def _end_if_over(self, at: float) -> Iterator[Effect]:
        """The run ends when everyone has finished, those included who were lost a moment ago and may come back."""
        roster = self.roster
        if self.is_closed or (roster.workers and (self.is_done or roster.num_finished < len(roster.workers))):
            return  # said at every tick and whenever somebody goes: asks no more than it must
        if not self.is_done and self.absent(at):
            return
        if not roster.workers:
            is_through = self.is_done or self.has_finished or self.is_any_rank_through
            if roster.was_anyone_here and is_through:
                self.is_closed = True
                yield effects.End(self.failure)
            return
        if self.has_weights and not self.policy.has_newest_weights:
            yield from self._fail(self._without_weights("the loops of all workers have ended"))
            return
        if self.has_weights and self.rhythm.wants_last(self.policy.version):
            # Once a worker has left, what it did cannot be done again.
            if not self.rhythm.is_writing:
                yield from self._take_snapshot(at)
            return
        self.is_done = True
        live = list(roster.workers.values())
        able = [worker.rank for worker in live if worker.can_evaluate and self.failure is None]
        self.evaluator = min(able, default=None)
        told = tuple((worker.rank, worker.incarnation) for worker in live)
        yield effects.TellDone(told, self.evaluator, self.policy.version)

    def absent(self, at: float) -> list[int]:
        """Ranks that were lost before their last training step, and not long ago."""
        since = at - self.options.absent_s
        return sorted(rank for rank, lost_at in self.lost_at.items() if lost_at > since)

    @property
    def is_any_rank_through(self) -> bool:
        """Some rank has taken all its training steps: a script may leave then without a word."""
        return any(map(self.policy.is_through, self.policy.num_counted))

    def _close(self, error: ParamServerError, at: float) -> Iterator[Effect]:
        """Nothing is decided any more: a round that everyone leaves is not to be closed with those who leave last."""
        self.is_closed = True
        for worker in self.roster.workers.values():
            yield effects.Refuse(worker.rank, worker.incarnation, error)
        has_newest = self.has_weights and self.policy.has_newest_weights
        if has_newest and not self.rhythm.is_writing and self.rhythm.wants_last(self.policy.version):
            yield from self._take_snapshot(at)

    def _failed(self, event: events.Failed) -> Iterator[Effect]:
        """Something outside went wrong: what it has left is no state to take a snapshot of."""
        if event.exit_code == DivergedError.exit_code:
            error: ParamServerError = DivergedError(event.message, fix=event.fix, reason=Reason.DIVERGED)
        else:
            error = ParamServerError(event.message, fix=event.fix)
            error.exit_code = event.exit_code
        yield from self._fail(error)

    def _fail(self, error: ParamServerError) -> Iterator[Effect]:
        self.is_closed = True
        self.rhythm.give_up()
        for worker in self.roster.workers.values():
            yield effects.Refuse(worker.rank, worker.incarnation, error)
        yield effects.End(error)

    def _ticked(self, event: events.Ticked) -> Iterator[Effect]:
        at = event.at
        silent = self.roster.silent(at)
        if self.is_closed:
            return
        for worker, silent_s in silent:
            reason = f"not heard of for {silent_s:.1f} s (server.lease_s is {self.options.lease_s:g})"
            error = refusal(Reason.NOT_JOINED, f"rank {worker.rank} was let go: {reason}")
            yield effects.Refuse(worker.rank, worker.incarnation, error)
            yield from self._leave(worker, "lease", reason, at)
        if self.has_weights:
            yield from self.performed(self.policy.tick(at), at)
        yield from self._end_if_over(at)

    # ---- what survives, and what must be the same everywhere: saving.py ---------------------

    def saved(self, at: float) -> dict[str, Any]:
        """What a snapshot keeps beside the tensors; JSON."""
        return saving.saved(self, at)

    def restore(self, version: int, model: tuple[str, str], saved: dict[str, Any], source: str = "") -> None:
        """Go on from a snapshot, before any event. Raises CheckpointError when the mode cannot."""
        saving.restore(self, version, model, saved, source)

    def digest(self) -> str:
        """The same on all shards after the same events."""
        return saving.digest(self)

    @property
    def was_over_before(self) -> bool:
        """It goes on from a snapshot of its end: every rank it needs has taken all its training steps, or has ended of
        its own accord; by another length than before that one is asked again."""
        counted = self.policy.num_counted
        is_complete = len(counted) >= (self.options.num_workers or 1)
        ranks = counted.keys() - (() if self.length.is_asked_anew else self.policy.out)
        return is_complete and all(map(self.policy.is_through, ranks))

    @property
    def is_over(self) -> bool:
        """Training has ended, as far as the clock of the summary is concerned."""
        return self.is_done or not self.roster.workers


# What a worker is told is over when it has been closed.
_BEFORE_THE_END = events.Offered | events.Brought | events.AskedAgain | events.StopAsked
_LOOKED_AT = frozenset((effects.Commit, effects.SendReply, effects.End))  # of what was decided: by `_after`


def _ignored(rank: int, why: str) -> Log:
    return Log("warning", "metrics_ignored", {"rank": rank, "reason": why})


def _stopping() -> ParamServerError:
    return refusal(Reason.DRAINING, "the server is stopping", fix="start ps-server again")
