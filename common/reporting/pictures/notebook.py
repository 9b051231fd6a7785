"""Displays runs in a notebook: text for a terminal, HTML with pictures for a page, no external resources.

IPython calls `_repr_mimebundle_` of an object. Names from users (tasks, runs, metrics) are escaped. `Shown` updates a
`Card` in place while the run goes on. It uses IPython only in a notebook, and never imports it elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..metrics import Display, shown_of_run
from . import Curves, Points, svg
from .words import duration, short_number

# ---- cards ----------------------------------------------------------------------------------------
# Notebook cards of a session, the summary of a run, and runs of the run store.


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


_SHOWN_EVERY_S = 0.5
_MOST_POINTS = 512  # losses that a session keeps; then every second point is dropped


@dataclass(frozen=True)
class Card:
    """A title, metrics by name, and pictures of curves with the name of their x axis."""

    title: str
    metrics: Sequence[tuple[str, str]]
    pictures: Sequence[tuple[str, Curves, str]] = ()  # (caption, curves, x axis)
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Returns one line, and another line for each note."""
        return "\n".join(["  ".join([self.title, *(f"{name} {value}" for name, value in self.metrics)]), *self.notes])

    def html(self) -> str:
        names = "".join(f"<th scope=col style='text-align:right'>{escape(name)}</th>" for name, _ in self.metrics)
        values = "".join(f"<td style='text-align:right'>{escape(value)}</td>" for _, value in self.metrics)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        table = f"<table><tr>{names}</tr><tr>{values}</tr></table>" if self.metrics else ""
        style = "<div style='max-width:720px;background:#fff;color:#000'>"
        drawn = "".join(
            f"<figure>{style}{svg(curves, escape(x))}</div><figcaption>{escape(caption)}</figcaption></figure>"
            for caption, curves, x in self.pictures if sum(len(points) for _, points in curves) > 1
        )  # fmt: skip
        return f"<div><strong>{escape(self.title)}</strong>{table}{notes}{drawn}</div>"

    def bundle(self, **_: Any) -> dict[str, str]:
        """Returns the formats for IPython's display."""
        return {"text/plain": self.text(), "text/html": self.html()}

    _repr_mimebundle_ = bundle


class Shown:
    """A card in a notebook's output, updated at most twice a second."""

    def __init__(self, card: Callable[[], Card]) -> None:
        self._card = card
        self._handle: Any = None
        self._at = 0.0

    def show(self) -> None:
        """Display the card in the current output cell. Without IPython, print it as text."""
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            print(self._card().text())
            return
        from IPython.display import display

        self._handle = display(self._card().bundle(), raw=True, display_id=True)

    def look_again(self, is_last: bool = False) -> None:
        """Update the card after a change."""
        if self._handle is not None and (is_last or time.monotonic() - self._at >= _SHOWN_EVERY_S):
            self._at = time.monotonic()
            self._handle.update(self._card().bundle(), raw=True)


@dataclass
class Losses:
    """The losses that a script recorded, thinned: (step, loss)."""

    points: list[tuple[float, float]] = field(default_factory=list)
    _every: int = 1
    _num: int = 0

    def note(self, step: int, loss: float) -> None:
        if self._num % self._every == 0:
            self.points.append((float(step), loss))
            if len(self.points) >= _MOST_POINTS:
                self.points, self._every = self.points[::2], 2 * self._every
        self._num += 1
