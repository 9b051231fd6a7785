"""The results of a run, as written by `--summary` and read by the launcher's comparison."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from ..config.conditions import Condition
from ..config.sections.launching import CostConfig
from ..wire.json_text import read_json, to_json
from .curve import MetricValue, Point, is_up, split_names
from .metrics import OF_RUN, Display, Metric, Tense
from .status import Measured, WorkerStatus

# Where ps-launch names the open file for the results of a process. A log line would not do: readers of lines limit
# their length, and anybody's output may look like one.
RESULTS_VARIABLE = "PS_RESULTS_DESCRIPTOR"


class ShardSummary(BaseModel):
    """One of several server processes; `bytes`: its memory at the end, by kind."""

    shard: int
    version: int = 0
    bytes: dict[str, int] = Field(default_factory=dict)

    @property
    def lasting_bytes(self) -> int:
        """Memory without the mean of a round, which exists only during a round."""
        return sum(count for name, count in self.bytes.items() if name != "mean")


class Cost(BaseModel):
    """The cost of the run's machines, from the first reply to the last contribution."""

    currency: str
    total: float
    waiting: float  # part of it for the time that workers wait for the mode
    per_epoch: float | None = None  # if the number of samples of an epoch is known

    @classmethod
    def of(cls, prices: CostConfig, wall_s: float, wait_share: float, epochs: float | None = None) -> Cost | None:
        """Returns the cost of so many seconds; None without prices."""
        if prices.rate is None:
            return None
        total = prices.rate * wall_s / 3600
        per_epoch = total / epochs if epochs else None
        return cls(currency=prices.currency, total=total, waiting=total * wait_share, per_epoch=per_epoch)

    def __str__(self) -> str:
        each = f", {price(self.per_epoch)} an epoch" if self.per_epoch is not None else ""
        return f"{price(self.total)} {self.currency}{each}; {price(self.waiting)} for waiting"


def price(amount: float) -> str:
    """Returns a price with two decimals, or two digits below a cent."""
    return f"{amount:,.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


class Summary(Measured):
    """The results of one run. `version` counts the updates of the weights: optimizer steps, or averages."""

    # Metrics that are fields or properties of this class.
    _OWN: ClassVar = frozenset(("version", "wall_s", "samples_per_s", "union_steps_per_s", "bytes_per_worker"))

    mode: str
    above: str = ""  # with regions, whose mode is `mode`: the mode of the run above, and its option
    staleness_bound: int | None = None
    local_steps: int = 1
    version: int = 0
    cosine: float | None = None  # between mean deltas of successive rounds, mean over them (diloco); of shard 0's part
    gain: float | None = None  # how much outer momentum amplifies a constant direction
    wall_s: float = 0.0  # from the first reply with weights to the last contribution
    step_s: float = 0.0  # per training step of each worker, after the first; 0: unknown
    # From the moment when every worker had taken its first training step, which loads much, to the last contribution:
    # seconds, and what all workers did in them. 0: not known.
    steady_s: float = 0.0
    steady_samples: int = 0
    steady_steps: int = 0
    staleness: dict[int, int] = Field(default_factory=dict)  # number of contributions by staleness; 64: 64 or more
    ended_by: str = ""  # who stopped it and why, or the failure; empty: all steps were taken
    final: dict[str, MetricValue] = Field(default_factory=dict)  # what the task's evaluation returned
    better: dict[str, str] = Field(default_factory=dict)  # `max` or `min` by metric, where it is stated
    curve: list[Point] = Field(default_factory=list)  # evaluations, with the final evaluation if there were others
    best: Point | None = None  # of them
    trained: list[Point] = Field(default_factory=list, exclude=True)  # training loss over time, for reports
    workers: list[WorkerStatus] = Field(default_factory=list)
    cost: Cost | None = None  # if prices are known
    shards: list[ShardSummary] = Field(default_factory=list)  # if the server has several processes

    _better = model_validator(mode="before")(split_names("final"))

    @classmethod
    def declared_metrics(cls) -> list[Metric]:
        wanted = (metric for metric in OF_RUN.values() if not metric.of_run or metric.display & Display.RESULTS)
        return [metric for metric in wanted if metric.name not in cls._OWN and metric.tense is not Tense.NOW]

    @property
    def label(self) -> str:
        """`ssp (staleness 3)`, `localsgd (8 local steps)`, `sync`, `sync in 2 regions, localsgd above`."""
        if self.above:
            return f"{self.mode} in {len(self.workers)} regions, {self.above} above"
        if self.staleness_bound is not None:
            return f"{self.mode} (staleness {self.staleness_bound})"
        return f"{self.mode} ({self.local_steps} local steps)" if self.local_steps > 1 else self.mode

    def is_up(self, metric: str) -> bool | None:
        """Returns whether a higher value of the metric is better; None if the direction is not known."""
        # What the points state, without metrics of which they state both.
        found = {item for point in self.curve for item in point.better.items()}
        stated = {name: way for name, way in found if (name, "min" if way == "max" else "max") not in found}
        return is_up(metric, stated | self.better)

    def points_of(self, metric: str) -> list[Point]:
        """Returns the evaluations with this metric; for `curve.TRAINED` the points of training."""
        return [point for point in (*self.curve, *self.trained) if metric in point.metrics]

    def reached(self, target: Condition) -> Point | None:
        """Returns the first point at which the target holds."""
        return next((point for point in self.points_of(target.metric) if target.holds(point.metrics)), None)

    def seconds_to(self, target: Condition) -> float | None:
        """Returns the seconds of training until the target held; None if it never did."""
        point = self.reached(target)
        return None if point is None else point.elapsed_s

    def _rate(self, steady: int, whole: int) -> float:
        """Returns a rate per second of two counts: of the steady part of the run if it is known, else of the whole."""
        count, seconds = (steady, self.steady_s) if self.steady_s > 0 else (whole, self.wall_s)
        return count / seconds if seconds > 0 else 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all workers per second, after every worker's first training step. None: batch size unknown."""
        return None if self.samples is None else self._rate(self.steady_samples, self.samples)

    @property
    def union_steps_per_s(self) -> float:
        """Steps of the union batch per second, after every worker's first training step.

        A union batch has one training step of each worker. The metric compares N workers with a single worker that
        trains on the batches of N (`single`).
        """
        return self._rate(self.steady_steps, self.training_steps) / max(1, len(self.workers))

    @property
    def bytes_per_worker(self) -> float:
        """Bytes between one worker and the server, both ways: mean over workers."""
        return float(self.num_bytes) / max(1, len(self.workers))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Returns the summary for a notebook."""
        from .pictures.cards import of_summary

        return of_summary(self).bundle()

    def text(self) -> str:
        """Returns the summary as JSON, for a file."""
        return to_json(self.model_dump(), indent=2) + "\n"

    @classmethod
    def read(cls, data: bytes) -> Summary | None:
        """Returns the summary that a process left in its file; None if it left none, or a part of it."""
        try:
            return cls.model_validate(read_json(data, nan=True, big=True))
        except ValueError:  # pydantic's is one
            return None
