"""Metrics of evaluations: the curve of a run, and the conditions under which they end it."""

from __future__ import annotations

from collections.abc import Iterator

from ...common.errors import ParamServerError, UsageError
from ...common.reporting.curve import Point, metric_fields
from ...common.reporting.metrics import total_or_unknown
from . import effects
from .effects import Effect, Log
from .ending import Ending
from .events import MetricsReceived


def received(run: Ending, event: MetricsReceived) -> Iterator[Effect]:
    """Take an evaluation during the run. Its metrics may stop the run; a failed evaluation ends it."""
    if run.is_closed or run.is_done or event.version > run.policy.version:
        return  # too late, or from before the run went back
    worker = None if event.rank is None else run.roster.workers.get(event.rank)
    if event.rank is not None and (worker is None or not worker.num_asked):
        yield ignored(
            event.rank, "the server did not ask this rank; it asks the evaluator process, or else the lowest rank"
        )
    elif event.failure:
        if run.failure is None:
            source = "the evaluator" if event.rank is None else f"rank {event.rank}"
            run.failure = ParamServerError(f"{source} failed in the evaluation at step {event.step}: {event.failure}")
            run.failure.exit_code = event.exit_code
            yield from _stop(run, event.at, rank=event.rank)
    elif all(point.version != event.version for point in run.curve.points):
        yield from evaluated(run, event.step, event.metrics, event.at, event.version)
        why = run.curve.why_enough
        if why and not run.policy.is_stopping:
            yield Log("info", "run_stopped", {"reason": why, "version": run.policy.version})
            yield from run.stop(f"stopped: {why}", event.at)


def evaluated(
    run: Ending, step: int, metrics: dict[str, float], at: float, version: int | None = None
) -> Iterator[Effect]:
    """Yields the effects of an evaluation of this version; None: the final one, perhaps evaluated before."""
    policy, curve = run.policy, run.curve
    of_version = policy.version if version is None else version
    if curve.points and curve.points[-1].version == of_version:
        return
    elapsed_s = round(run.contributions.elapsed_s(at, run.has_training_ended), 3)
    samples = total_or_unknown([policy.row(rank).samples for rank in policy.rows])
    point = Point(step=step, version=of_version, elapsed_s=elapsed_s, metrics=metrics, samples=samples)
    is_best = curve.add(point)
    yield effects.Evaluated(point, is_best)
    if version is not None:
        fields = {"step": step, "version": of_version, "best": is_best, **metric_fields(point.metrics)}
        yield Log("info", "evaluated", fields)
    if len(curve.points) > 1:
        return
    why, fix = curve.unclear()
    wants_best = run.options.patience is not None or run.options.best is not None
    if why and version is not None and run.failure is None and wants_best:
        run.failure = UsageError(f"run.patience and run.best need a best evaluation; {why}", fix=fix)
        yield from _stop(run, at, rank=None, step=step, fix=fix)
    elif why:
        yield Log("info", "no_best", {"reason": why, "fix": fix})
    if lacks := curve.lacks():
        yield Log("warning", "no_such_metric", {"reason": lacks})


def _stop(run: Ending, at: float, rank: int | None, **fields: object) -> Iterator[Effect]:
    """Stop the run, which has failed."""
    assert run.failure is not None
    message, exit_code = run.failure.message, run.failure.exit_code
    yield Log("error", "run_failed", {"rank": rank, "reason": message, "exit_code": exit_code, **fields})
    yield from run.stop(message, at)


def ignored(rank: int, why: str) -> Log:
    return Log("warning", "metrics_ignored", {"rank": rank, "reason": why})
