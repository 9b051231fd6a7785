"""Notebook cards of a session, the summary of a run, and runs of the run store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..metrics import Display, shown_of_run
from . import Curves, Points
from .notebook import Card
from .words import duration, short_number

# `summary.py` and `common/runstore/reading.py` import this file, so it uses their classes only by attributes.


def of_session(mode: str, at: tuple[int, int, int, bool] | None, losses: Points, metrics: Mapping[str, float]) -> Card:
    """Returns the card of a session. `at`: rank, number of workers, step, is done; None before it joins."""
    if at is None:
        return Card(f"session: {mode}", [], notes=["no step yet: session.optimizer() joins the run"])
    rank, num_workers, step, is_done = at
    shown = [("rank", f"{rank} of {num_workers}"), ("step", f"{step:,}"), ("state", "done" if is_done else "training")]
    shown += [("loss", short_number(losses[-1][1]))] if losses else []
    shown += [(name, short_number(value)) for name, value in metrics.items()]
    return Card(f"session: {mode}", shown, [("loss of this worker", [("loss", losses)], "step")])


def of_summary(summary: Any) -> Card:
    """Returns the card of a finished run."""
    shown = [(name, short_number(value)) for name, value in summary.final.items()]
    shown += [*_metrics(summary), ("workers", str(len(summary.workers)))]
    shown += [("cost", str(summary.cost))] if summary.cost is not None else []
    notes = [summary.ended_by] if summary.ended_by else []
    return Card(summary.label, shown, _evaluated(summary.curve), notes)


def of_stored(run: Any, series: Sequence[Any], evaluations: Sequence[Any]) -> Card:
    """Returns the card of a run in the run store."""
    shown = [("state", run.state), ("task", run.work), ("step", f"{run.step:,}"), ("time", duration(run.elapsed_s))]
    shown += [(name, short_number(value)) for name, value in run.metrics.items()]
    shown += [*_metrics(run), ("workers", str(run.num_workers))]
    losses = [(float(point.step), point.loss) for point in series if point.loss is not None]
    pictures: list[tuple[str, Curves, str]] = [("loss of training", [("loss", losses)], "step")]
    return Card(run.label, shown, [*pictures, *_evaluated(evaluations)], [run.ended_by] if run.ended_by else [])


def _metrics(run: Any) -> list[tuple[str, str]]:
    """Returns the known notebook metrics of the run, as label and text."""
    values = [(metric, getattr(run, metric.name, None)) for metric in shown_of_run(Display.NOTEBOOK)]
    return [(metric.label, metric.text(value)) for metric, value in values if value is not None]


def of_list(path: str, runs: Sequence[Any]) -> Card:
    """Returns the card of a run store, the newest run first."""
    notes = [f"{run.label}: {run.mode}, {run.work}, {run.state}, step {run.step:,}" for run in runs]
    return Card(f"{path}: {len(runs)} runs", [], notes=notes)


def _evaluated(points: Sequence[Any]) -> list[tuple[str, Curves, str]]:
    names = dict.fromkeys(name for point in points for name in point.metrics)
    return [
        (f"{name}, evaluated", [(name, [(p.step, p.metrics[name]) for p in points if name in p.metrics])], "step")
        for name in names
    ]
