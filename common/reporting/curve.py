"""The evaluations of a run: the best evaluation, and whether the run may stop. Pure."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from ..config.conditions import condition
from ..errors import plain
from ..wire.json_text import to_json

# Fields of the event of an evaluation, and of every event.
_RESERVED = {"step", "version", "best", "event", "level", "timestamp", "program", "exception", "exc_info", "_routine"}
TRAINED = "train_loss"  # the metric of training itself, where nothing was evaluated
_MOST_TRAINED = 1_000  # points; at twice as many, every second point is dropped
# Words of a metric's name that say which of two values is better.
_HIGH = frozenset((
    "accuracy", "acc", "f1", "auc", "bleu", "rouge", "iou", "miou", "dice", "precision", "recall", "ndcg",
    "mrr", "psnr", "ssim", "reward", "solved", "success", "r2", "power", "map", "ap", "auprc", "auroc", "meteor",
    "rouge1", "rouge2", "rougel", "chrf", "kappa", "mcc", "score", "return", "returns", "elo", "top1", "top5", "em",
))  # fmt: skip
_LOW = frozenset((
    "loss", "error", "err", "perplexity", "ppl", "nll", "wer", "cer", "fid", "mse", "mae", "rmse", "mape", "bpc", "bpb",
    "kl", "regret", "ece", "eer", "brier", "logloss", "lpips", "mase", "smape", "ter", "bpp",
))  # fmt: skip


def is_up(metric: str, better: Mapping[str, str] | None = None) -> bool | None:
    """Returns whether a higher value of the metric is better; None if the direction is not known.

    `better`: what a task, script or setting states, `max` or `min` by metric. Otherwise whole words of the name decide.
    """
    if better and metric in better:
        return better[metric] == "max"
    words = re.findall(r"[a-z0-9]+", metric.lower())
    is_high = not _HIGH.isdisjoint(words)
    is_low = not _LOW.isdisjoint(words) or "bits per" in " ".join(words)
    return is_high if is_high != is_low else None


def stated(name: str) -> tuple[str, str]:
    """Returns a metric's name and what is stated behind it: `reward:max` is (reward, max), `reward` is (reward, "")."""
    metric, _, way = name.rpartition(":")
    return (metric, way) if metric and way in ("max", "min") else (name, "")


def split_names(field: str) -> Callable[[Any], Any]:
    """Returns a validator that takes `:max` and `:min` off the names of the metrics in `field`."""

    def split(values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(metrics := values.get(field), Mapping):
            return values
        ways = {metric: way for metric, way in map(stated, metrics) if way}
        clean = {stated(name)[0]: value for name, value in metrics.items()}
        return {**values, field: clean, "better": {**values.get("better", {}), **ways}} if ways else values

    return split


# In JSON null stands for a number that is not finite.
MetricValue = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class Point(BaseModel):
    """One evaluation of the weights of one version. A name `reward:max` states that more is better."""

    step: int  # training steps until then
    version: int
    elapsed_s: float = 0.0  # seconds of training until the metrics arrived
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    num_bytes: int | None = None  # bytes exchanged until then, if known
    samples: int | None = None  # samples counted until then, if known
    better: dict[str, Literal["max", "min"]] = Field(default_factory=dict)  # by metric, where it is stated

    _better = model_validator(mode="before")(split_names("metrics"))

    def named(self) -> dict[str, float]:
        """Returns the metrics with what is stated behind their names."""
        return {f"{name}:{self.better[name]}" if name in self.better else name: value
                for name, value in self.metrics.items()}  # fmt: skip


@dataclass
class Curve:
    """All evaluations of a run, in the order they came."""

    best_of: str | None = None  # the deciding metric, `reward:max`; None: accuracy, else loss, else the first
    stop_when: str | None = None
    patience: int | None = None  # the run stops after this many evaluations without improvement
    points: list[Point] = field(default_factory=list)
    best: Point | None = None
    _num_worse: int = 0

    def add(self, point: Point) -> bool:
        """Add an evaluation. Returns whether it is the best so far."""
        metric, way = stated(self.best_of or "")
        if way and metric in point.metrics:
            point.better[metric] = "max" if way == "max" else "min"
        self.points.append(point)
        value, best = self._value(point), None if self.best is None else self._value(self.best)
        up = self._is_up
        is_best = math.isfinite(value) and up is not None and (best is None or (value > best if up else value < best))
        if is_best:
            self.best = point
        self._num_worse = 0 if is_best else self._num_worse + 1
        return is_best

    @property
    def metric(self) -> str:
        """The deciding metric."""
        if self.best_of is not None:
            return stated(self.best_of)[0]
        names = self.points[0].metrics if self.points else {}
        known = [name for name in names if is_up(name, self.points[0].better) is not None]
        return next((name for name in ("accuracy", "loss", *known, *names) if name in names), "")

    @property
    def _is_up(self) -> bool | None:
        return is_up(self.metric, self.points[-1].better if self.points else None)

    def unclear(self) -> tuple[str, str]:
        """Returns why there is no best evaluation, as a sentence and its fix; empty if there may be one."""
        metric = self.metric
        if not self.points or metric not in self.points[-1].metrics or self._is_up is not None:
            return "", ""
        return (f"there is no best evaluation: is more or less {metric} better?",
                f"--best {metric}:max or {metric}:min, or return it under that name")  # fmt: skip

    @property
    def why_enough(self) -> str:
        """The reason to stop the run, as a phrase; empty if it should continue."""
        if not self.points:
            return ""
        newest = self.points[-1]
        if self.stop_when is not None and (wanted := condition(self.stop_when)).holds(newest.metrics):
            return f"{wanted} (run.stop_when): {newest.metrics[wanted.metric]:.6g} at step {newest.step}"
        if self.patience is not None and self._num_worse >= self.patience and self._is_up is not None:
            best = f", {self._value(self.best):.6g} at step {self.best.step}" if self.best is not None else ""
            return f"no better {self.metric} in {self._num_worse} evaluations (run.patience){best}"
        return ""

    def lacks(self) -> str:
        """Returns the configured metrics that the newest point lacks, as a phrase; empty if it lacks none."""
        of_stop = condition(self.stop_when).metric if self.stop_when is not None else ""
        measured = self.points[-1].metrics if self.points else {}
        missing = [name for name in (stated(self.best_of or "")[0], of_stop) if name and name not in measured]
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


def metric_fields(metrics: Mapping[str, Any], reserved: Collection[str] = _RESERVED) -> dict[str, Any]:
    """Returns metrics as fields of an event, or another record, under names that no `reserved` field of it has."""
    return {f"metrics.{name}" if name in reserved else name: value for name, value in metrics.items()}


def text_of(points: list[Point], path: str) -> str:
    """Returns the points as text of a file: CSV with a column for each metric, or JSON lines."""
    columns = ("step", "version", "elapsed_s")
    rows = [
        {name: getattr(point, name) for name in columns} | metric_fields(point.metrics, columns) for point in points
    ]
    if path.endswith(".jsonl"):
        return "".join(to_json(row) + "\n" for row in rows)
    return csv_text(rows)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as CSV, with a column for each name and a line for each row."""
    out, names = io.StringIO(), dict.fromkeys(name for row in rows for name in row)
    writer = csv.writer(out, lineterminator="\n")
    for cells in ([*names], *([row.get(name, "") for name in names] for row in rows)):
        writer.writerow([plain(cell) if isinstance(cell, str) else cell for cell in cells])
    return out.getvalue()
