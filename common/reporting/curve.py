"""The evaluations of a run: the best evaluation, and whether the run may stop. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from ..config.conditions import condition
from ..wire.json_text import to_json

TRAINED = "train_loss"  # the metric of training itself, where nothing was evaluated
_MOST_TRAINED = 1_000  # points; at twice as many, every second point is dropped
# For a metric with one of these words in its name, less is better.
_DOWN = ("loss", "error", "perplexity", "mse", "mae", "wer")


def is_up(metric: str) -> bool:
    """Returns whether a higher value of the metric is better."""
    return not any(word in metric.lower() for word in _DOWN)


# In JSON null stands for a number that is not finite.
MetricValue = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class Point(BaseModel):
    """One evaluation of the weights of one version."""

    step: int  # training steps until then
    version: int
    elapsed_s: float = 0.0  # seconds of training until the metrics arrived
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    num_bytes: int | None = None  # bytes exchanged until then, if known
    samples: int | None = None  # samples counted until then, if known


@dataclass
class Curve:
    """All evaluations of a run, in the order they came."""

    best_of: str | None = None  # the deciding metric; None: accuracy if there is one, else loss, else the first
    stop_when: str | None = None
    patience: int | None = None  # the run stops after this many evaluations without improvement
    points: list[Point] = field(default_factory=list)
    best: Point | None = None
    _num_worse: int = 0

    def add(self, point: Point) -> bool:
        """Add an evaluation. Returns whether it is the best so far."""
        self.points.append(point)
        value, best = self._value(point), None if self.best is None else self._value(self.best)
        is_best = not math.isnan(value) and (best is None or (value > best if is_up(self.metric) else value < best))
        if is_best:
            self.best = point
        self._num_worse = 0 if is_best else self._num_worse + 1
        return is_best

    @property
    def metric(self) -> str:
        """The deciding metric."""
        names = list(self.points[0].metrics) if self.points else []
        return self.best_of or next((name for name in ("accuracy", "loss", *names) if name in names), "")

    @property
    def why_enough(self) -> str:
        """The reason to stop the run, as a phrase; empty if it should continue."""
        if not self.points:
            return ""
        newest = self.points[-1]
        if self.stop_when is not None and (wanted := condition(self.stop_when)).holds(newest.metrics):
            return f"{wanted} (run.stop_when): {newest.metrics[wanted.metric]:.6g} at step {newest.step}"
        if self.patience is not None and self._num_worse >= self.patience:
            best = f", {self._value(self.best):.6g} at step {self.best.step}" if self.best is not None else ""
            return f"no better {self.metric} in {self._num_worse} evaluations (run.patience){best}"
        return ""

    def lacks(self) -> str:
        """Returns the configured metrics that the newest point lacks, as a phrase; empty if it lacks none."""
        wanted = [self.best_of, condition(self.stop_when).metric if self.stop_when is not None else None]
        measured = self.points[-1].metrics if self.points else {}
        missing = [name for name in wanted if name is not None and name not in measured]
        return f"{' and '.join(missing)}: the evaluation gave {', '.join(measured) or 'nothing'}" if missing else ""

    def _value(self, point: Point) -> float:
        return point.metrics.get(self.metric, math.nan)

    def saved(self) -> dict[str, Any]:
        """Returns the curve as JSON, for a snapshot."""
        best = self.points.index(self.best) if self.best is not None else None
        return {"points": [point.model_dump() for point in self.points], "best": best, "worse": self._num_worse}

    def restore(self, saved: Any) -> None:
        """Restore the curve from a snapshot. If the snapshot has no complete curve, the curve is empty."""
        try:
            points = [Point.model_validate(point) for point in saved["points"]]
            self.best = None if saved["best"] is None else points[saved["best"]]
            self.points, self._num_worse = points, int(saved["worse"])
        except (KeyError, TypeError, ValueError, IndexError):
            self.points, self.best, self._num_worse = [], None, 0


def add_trained(points: list[Point], status: Any) -> None:
    """Add the training loss of one more `Status`, or row of the run store, and its other metrics.

    If the run went back to a snapshot, this removes the points of later steps.
    """
    while points and points[-1].step > status.step:
        points.pop()
    if status.loss is None or (points and points[-1].step == status.step):
        return
    others = {name: value for name, value in status.row().items() if value is not None and name != "loss"}
    recorded = {f"recorded.{name}": value for name, value in status.recorded.items()}
    metrics = {TRAINED: status.loss, **others, **recorded}  # `loss` names the loss of evaluations
    at = {name: getattr(status, name) for name in ("step", "version", "elapsed_s", "samples")}
    points.append(Point(**at, metrics=metrics, num_bytes=status.num_bytes or None))
    if len(points) >= 2 * _MOST_TRAINED:
        points[:] = points[::2]


def text_of(points: list[Point], path: str) -> str:
    """Returns the points as text of a file: CSV with a column for each metric, or JSON lines."""
    rows = [{**point.model_dump(exclude={"metrics", "num_bytes", "samples"}), **point.metrics} for point in points]
    if path.endswith(".jsonl"):
        return "".join(to_json(row) + "\n" for row in rows)
    return csv_text(rows)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as CSV, with a column for each name."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
