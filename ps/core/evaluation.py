"""Metrics of evaluations: whose count, the curve that they make, and how they end a run."""

from __future__ import annotations

from collections.abc import Iterator

from ...common.errors import ParamServerError, UsageError
from ...common.reporting.curve import Point, metric_fields
from ...common.reporting.metrics import total_or_unknown
from . import effects, events
from .effects import Effect, Log
from .ending import Ending
from .roster import Worker


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
