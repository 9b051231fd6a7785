"""The cards of what a notebook may be asked to show: a session, the summary of a run, runs on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import Curves
from .notebook import Card
from .words import duration, figure, share, size

# What is shown (`summary.py`, `common/runstore/reading.py`) imports this file, which knows it by its attributes alone.


def of_session(
    mode: str,
    where: tuple[int, int, int, bool] | None,
    losses: Sequence[tuple[float, float]],
    figures: Mapping[str, float],
) -> Card:
    """A worker of a script. `where`: rank, number of workers, step, whether it is done; None before its optimizer."""
    if where is None:
        return Card(f"session: {mode}", [], notes=["no step yet: session.optimizer() joins the run"])
    rank, num_workers, step, is_done = where
    shown = [("rank", f"{rank} of {num_workers}"), ("step", f"{step:,}"), ("state", "done" if is_done else "training")]
    shown += [("loss", figure(losses[-1][1]))] if losses else []
    shown += [(name, figure(value)) for name, value in figures.items()]
    return Card(f"session: {mode}", shown, [("loss of this worker", [("loss", losses)], "step")])


def of_summary(summary: Any) -> Card:
    """The end of a run."""
    shown = [(name, figure(value)) for name, value in summary.final.items()]
    shown += [
        ("updates", f"{summary.updates:,}"), ("time", duration(summary.wall_s)),
        ("samples", "-" if summary.num_samples is None else f"{summary.num_samples:,}"),
        ("waiting", share(summary.wait_share)), ("stale mean", f"{summary.staleness_mean:.2f}"),
        ("stale max", str(summary.staleness_max)),
        ("traffic", size(summary.num_bytes)), ("workers", str(len(summary.workers))),
    ]  # fmt: skip
    shown += [("cost", str(summary.cost))] if summary.cost is not None else []
    notes = [summary.ended_by] if summary.ended_by else []
    return Card(summary.label, shown, _evaluated(summary.curve), notes)


def of_stored(run: Any, series: Sequence[Any], evaluations: Sequence[Any]) -> Card:
    """A run on record."""
    shown = [("state", run.state), ("task", run.work), ("step", f"{run.step:,}"), ("time", duration(run.elapsed_s))]
    shown += [("loss", figure(run.loss))] if run.loss is not None else []
    shown += [(name, figure(value)) for name, value in run.figures.items()]
    shown += [("workers", str(run.num_workers)), ("traffic", size(run.num_bytes))]
    losses = [(float(point.step), point.loss) for point in series if point.loss is not None]
    pictures: list[tuple[str, Curves, str]] = [("loss of training", [("loss", losses)], "step")]
    return Card(run.label, shown, [*pictures, *_evaluated(evaluations)], [run.ended_by] if run.ended_by else [])


def of_list(path: str, runs: Sequence[Any]) -> Card:
    """What a file has, the newest first."""
    notes = [f"{run.label}: {run.mode}, {run.work}, {run.state}, step {run.step:,}" for run in runs]
    return Card(f"{path}: {len(runs)} runs", [], notes=notes)


def _evaluated(points: Sequence[Any]) -> list[tuple[str, Curves, str]]:
    names = dict.fromkeys(name for point in points for name in point.figures)
    return [
        (f"{name}, evaluated", [(name, [(p.step, p.figures[name]) for p in points if name in p.figures])], "step")
        for name in names
    ]
