"""Metrics of evaluations: the curve of a run, and the conditions under which they end it."""

from __future__ import annotations

from collections.abc import Iterator

from ...common.errors import ParamServerError, UsageError
from ...common.reporting.curve import Point, metric_fields
from ...common.reporting.metrics import total_or_unknown
from . import effects, events
from .effects import Effect, Log
from .ending import Ending


class Evaluations:
    """The evaluations of one run."""

    def __init__(self, run: Ending) -> None:
        self._run = run

    def received(self, event: events.MetricsReceived) -> Iterator[Effect]:
        """Take an evaluation during the run. Its metrics may stop the run; a failed evaluation ends it."""
        if self._run.is_closed or self._run.is_done or event.version > self._run.policy.version:
            return  # too late, or from before the run went back
        worker = None if event.rank is None else self._run.roster.workers.get(event.rank)
        if event.rank is not None and (worker is None or not worker.num_asked):
            yield ignored(
                event.rank, "the server did not ask this rank; it asks the evaluator process, or else the lowest rank"
            )
        elif event.failure:
            yield from self._failed(event)
        elif all(point.version != event.version for point in self._run.curve.points):
            yield from self.evaluated(event.step, event.metrics, event.at, event.version)
            why = self._run.curve.why_enough
            if why and not self._run.policy.is_stopping:
                yield Log("info", "run_stopped", {"reason": why, "version": self._run.policy.version})
                yield from self._run.stop(f"stopped: {why}", event.at)

    def evaluated(
        self, step: int, metrics: dict[str, float], at: float, version: int | None = None
    ) -> Iterator[Effect]:
        """Yields the effects of an evaluation of this version; None: the final one, perhaps evaluated before."""
        evaluated = self._run.policy.version if version is None else version
        if self._run.curve.points and self._run.curve.points[-1].version == evaluated:
            return
        elapsed_s = round(self._run.contributions.elapsed_s(at, self._run.has_training_ended), 3)
        policy = self._run.policy
        samples = total_or_unknown([policy.row(rank).samples for rank in policy.rows])
        point = Point(step=step, version=evaluated, elapsed_s=elapsed_s, metrics=metrics, samples=samples)
        is_best = self._run.curve.add(point)
        yield effects.Evaluated(point, is_best)
        if version is not None:
            yield Log(
                "info",
                "evaluated",
                {"step": step, "version": evaluated, "best": is_best, **metric_fields(point.metrics)},
            )
        if len(self._run.curve.points) == 1:
            yield from self._unclear(step, at, is_final=version is None)
        if (lacks := self._run.curve.lacks()) and len(self._run.curve.points) == 1:
            yield Log("warning", "no_such_metric", {"reason": lacks})

    def _unclear(self, step: int, at: float, is_final: bool) -> Iterator[Effect]:
        """Say that no evaluation is the best; end a run that asked for the best, or that stops without improvement."""
        why, fix = self._run.curve.unclear()
        options = self._run.options
        if (
            why
            and not is_final
            and self._run.failure is None
            and (options.patience is not None or options.best is not None)
        ):
            self._run.failure = UsageError(f"run.patience and run.best need a best evaluation; {why}", fix=fix)
            failure = self._run.failure
            fields = {"rank": None, "reason": failure.message, "exit_code": failure.exit_code, "step": step, "fix": fix}
            yield Log("error", "run_failed", fields)
            yield from self._run.stop(self._run.failure.message, at)
        elif why:
            yield Log("info", "no_best", {"reason": why, "fix": fix})

    def _failed(self, event: events.MetricsReceived) -> Iterator[Effect]:
        if self._run.failure is not None:
            return
        source = "the evaluator" if event.rank is None else f"rank {event.rank}"
        self._run.failure = ParamServerError(f"{source} failed in the evaluation at step {event.step}: {event.failure}")
        self._run.failure.exit_code = event.exit_code
        fields = {"rank": event.rank, "reason": self._run.failure.message, "exit_code": event.exit_code}
        yield Log("error", "run_failed", fields)
        yield from self._run.stop(self._run.failure.message, event.at)


def ignored(rank: int, why: str) -> Log:
    return Log("warning", "metrics_ignored", {"rank": rank, "reason": why})
