"""The status of a run at one moment, its results, and its state for viewers, which is one type from the server to the
dashboard and the run store.

A `Tick` is a status with the events since the tick before. A `View` collects ticks, so that a dashboard opened in the
middle of a run has all it needs. Its size is limited, however long the run is. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from ..config.conditions import Condition
from ..config.sections.launching import CostConfig
from ..wire.json_text import read_json, to_json
from .curve import MetricValue, Point, is_up, split_names
from .metrics import OF_RUN, OF_WORKER, Display, Metric, Presence, Tense, Value, completed, folded, shown_of_run
from .pictures.words import short_number

# ---- status --------------------------------------------------------------------------------------
# The status of a run at one moment: one type from the server (or a run without a server) to the screen.
#
# The log event `status`, the reply to the call Status (proto/parameter_server.proto) and the launcher's view use it.
# Its numbers are the metrics of `metrics.py`, as attributes by their names.


RECORDED = "recorded."  # before the name of a metric that a script records
_OFTEN_EMPTY = ("versions", "shard_bytes", "evaluated", "left_out", "recorded")


def names_of(workers: Sequence[WorkerStatus]) -> str:
    """`worker 1, 2`, or `region eu, us`."""
    kind = "region" if workers[0].region else "worker"
    return f"{kind} {', '.join(worker.region or str(worker.rank) for worker in workers)}"


class Measured(BaseModel):
    """A record with metrics beside its fields: attributes with the names of the table.

    A missing metric is that of the record's `workers` together, if it has them; else it is derived from others, or has
    its default. Unknown names are ignored.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float | None] = Field(init=False)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def declared_metrics(cls) -> list[Metric]:
        """Returns the metrics that such a record has."""
        return [metric for metric in OF_RUN.values() if not metric.of_run or metric.display & Display.STATUS]

    def row(self) -> dict[str, Value]:
        """All metrics by name."""
        return dict(self.model_extra or {})

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Returns a record of values that need no validation."""
        made: Any = cls.model_construct(**values | completed(cls.declared_metrics(), values))
        return made

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {*cls.model_fields, *(metric.name for metric in cls.declared_metrics())}
        return {name: value for name, value in data.items() if name in known}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        extra, workers = self.__pydantic_extra__, getattr(self, "workers", ())
        added = folded(workers, lambda metric, worker: worker.row()[metric.name]) if workers else {}
        extra.update(completed(self.declared_metrics(), added | extra))
        return self


class WorkerStatus(Measured):
    """One rank: at one moment (status) or at the end (summary). Sums are over all its incarnations."""

    rank: int
    state: str = ""  # joining, computing, uploading, waiting, away, finished, gone
    state_s: float = 0.0  # seconds since it began to compute or to wait
    waiting_for: str = ""  # a sentence; empty when it does not wait
    transport: str = "grpc"  # how its tensors travel: "grpc", "direct" or "shared memory"
    transport_reason: str = ""  # why it is not the transport that the worker prefers
    codec: str = "raw"  # of its newest contribution; auto's choice
    region: str = ""  # whose relay it is
    recorded: dict[str, MetricValue] = Field(default_factory=dict)  # by its script: `session.record(name=...)`

    @property
    def presence(self) -> Presence:
        """Of a record without a state, such as one of a summary, all take part."""
        return Presence(is_live=self.state not in ("finished", "gone"), is_lost=self.state == "gone")

    @property
    def label(self) -> str:
        """Its rank, and its region's name if that is another: `1`, `1 us`."""
        return str(self.rank) if self.region in ("", str(self.rank)) else f"{self.rank} {self.region}"

    @classmethod
    def declared_metrics(cls) -> list[Metric]:
        return list(OF_WORKER.values())


class Status(Measured):
    """The run at one moment. `step` is the smallest of the live workers, in training steps."""

    mode: str = ""
    evaluated: Point | None = None  # the newest evaluation
    recorded: dict[str, MetricValue] = Field(default_factory=dict)  # by scripts: mean of the workers that have it
    waiting: str = ""  # a sentence: what everyone waits for; empty when somebody may compute
    workers: list[WorkerStatus] = Field(default_factory=list)  # of many workers, first the workers that others wait for
    left_out: int = 0  # number of ranks not in `workers`
    versions: list[int] = Field(default_factory=list)  # of each shard, if there are several
    shard_bytes: list[int] = Field(default_factory=list)  # memory of each shard

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Status | None:
        """Parse the fields of a log event. Returns None if they are not a status. Unknown fields are ignored."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError:
            return None

    def fields(self) -> dict[str, Any]:
        """Returns the fields for a log event."""
        return self.model_dump(exclude={name for name in _OFTEN_EMPTY if not getattr(self, name)})

    @property
    def num_ranks(self) -> int:
        """Number of ranks that took part in the run, including departed ranks."""
        return len(self.workers) + self.left_out

    @computed_field  # type: ignore[prop-decorator]
    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first step."""
        if not self.step or not self.steps:
            return None
        return float(self.elapsed_s / self.step * max(0, self.steps - self.step))

    def waiting_reason(self) -> str:
        """Returns why all workers wait, or else the first waiting worker; empty if none waits."""
        if self.waiting:
            return self.waiting
        waiting = [worker for worker in self.workers if worker.waiting_for]
        rest = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        return f"{names_of(waiting[:1])}: {waiting[0].waiting_for}{rest}" if waiting else ""


# ---- summary -------------------------------------------------------------------------------------

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
        from .pictures.notebook import of_summary

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


_MOST_ROWS = 1_000  # of the series; at twice as many, every second row is dropped
_MOST_EVENTS = 300
_MOST_SNAPSHOTS = 100
_MOST_SPANS = 4_000  # of the time line
_AT_ONCE_S = 0.05  # one start reaches the dashboard and the run store within this time


class Event(BaseModel):
    """Something that happened in a run; `fields` as in the history (docs/robustness.md)."""

    at: float  # Unix seconds
    kind: str  # start, join, leave, snapshot, evaluated, control, end
    text: str = ""  # a sentence
    rank: int | None = None
    fields: Mapping[str, Any] = Field(default_factory=dict, exclude=True)


class Snapshot(BaseModel):
    """A snapshot of the run on a disk."""

    version: int
    at: float  # Unix seconds
    path: str
    sha256: str = ""  # of the weights


class EvaluatedPoint(Point):
    is_best: bool = False  # of those before it


class Span(BaseModel):
    """A worker's time between two contributions: first waiting, then transfer, then computing.

    Rank -1 is the server: the time of its tensor work. If contributions arrive often, a span covers several.
    """

    rank: int
    begin_s: float  # of the server's clock since the run began or went on
    wait_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    apply_s: float = 0.0


class Wait(BaseModel):
    """A worker that waits, the ranks it waits for (empty: for none in particular), and why."""

    rank: int
    ranks: list[int] = Field(default_factory=list)
    why: str


class Tick(BaseModel):
    """A run at one moment, with the events since the tick before."""

    at: float  # Unix seconds
    clock_s: float = 0.0  # as in `Span`
    status: Status
    cost: Cost | None = None
    final: dict[str, float] = Field(default_factory=dict)  # result of the task's evaluation, at the end
    staleness: dict[int, int] = Field(default_factory=dict)  # contributions by versions behind, of the whole run
    durable_version: int | None = None  # of the newest snapshot; None before the first
    waits: list[Wait] = Field(default_factory=list)
    spans: list[Span] = Field(default_factory=list)
    events: list[Event] = Field(default_factory=list)
    evaluations: list[EvaluatedPoint] = Field(default_factory=list)
    snapshots: list[Snapshot] = Field(default_factory=list)
    is_over: bool = False
    better: dict[str, str] = Field(default_factory=dict)  # of `final`, where it is stated

    _better = model_validator(mode="before")(split_names("final"))


class About(BaseModel):
    """Description of the run."""

    run: str
    mode: str = ""
    label: str = ""  # the mode with its options of now: `ssp (staleness 3)`
    task: str = ""
    started: float = 0.0  # Unix seconds
    server_incarnation: int = 1
    version: str = ""  # of the program
    settings: dict[str, Any] = Field(default_factory=dict)  # the configuration, of sections, with what was set since
    lr_scale: float = 1.0  # factor on the server's learning rate
    controls: list[str] = Field(default_factory=list)  # commands that the run takes


def series_columns() -> list[str]:
    """Returns the names of the metrics that the dashboard draws over time."""
    return [metric.name for metric in shown_of_run(Display.DASHBOARD | Display.CURVES)]


def series_of(statuses: Sequence[Any], names: Iterable[str] | None = None) -> dict[str, list[Value]]:
    """Returns the metrics in columns; metrics of scripts are `recorded.NAME`. `names`: as from `series_columns`."""
    columns = {name: [getattr(status, name) for status in statuses] for name in names or series_columns()}
    recorded = dict.fromkeys(name for status in statuses for name in status.recorded)
    return columns | {f"{RECORDED}{name}": [status.recorded.get(name) for status in statuses] for name in recorded}


class View(BaseModel):
    """All data that the dashboard shows of one run."""

    about: About
    newest: Tick | None = None
    series: dict[str, list[Value]] = Field(default_factory=lambda: series_of([]))
    evaluations: list[EvaluatedPoint] = Field(default_factory=list)
    snapshots: list[Snapshot] = Field(default_factory=list)  # that are there, the oldest first
    events: deque[Event] = Field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    spans: deque[Span] = Field(default_factory=lambda: deque(maxlen=_MOST_SPANS))

    def add(self, tick: Tick) -> None:
        self.newest = tick
        self.events.extend(tick.events)
        self.spans.extend(tick.spans)
        self.evaluations.extend(tick.evaluations)
        self.add_snapshots(tick.snapshots)
        if tick.status.workers or tick.status.step:
            row, num_before = series_of([tick.status]), len(self.series["step"])
            for name in self.series | row:
                self.series.setdefault(name, [None] * num_before).extend(row.get(name, [None]))
            if num_before + 1 >= 2 * _MOST_ROWS:
                self.series = {name: values[::2] for name, values in self.series.items()}

    def add_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        """Add snapshots, and keep as many as the run keeps on its disk."""
        of_version = {snapshot.version: snapshot for snapshot in (*self.snapshots, *snapshots)}
        most = self.about.settings.get("checkpoint", {}).get("keep") or _MOST_SNAPSHOTS
        self.snapshots = list(of_version.values())[-min(most, _MOST_SNAPSHOTS) :]

    def continue_from(self, before: View, version: int) -> None:
        """Load the data from before the server restarted from `version`, without later versions.

        The run store may already have the first events of this start.
        """
        is_kept = [reached is not None and reached <= version for reached in before.series["version"]]
        self.series = {name: [*compress(values, is_kept)] for name, values in before.series.items()}
        kept = [point for point in before.evaluations if point.version <= version]
        self.evaluations = kept if len(kept) >= len(self.evaluations) else self.evaluations
        self.add_snapshots(snapshot for snapshot in before.snapshots if snapshot.version <= version)
        self.events.extend(event for event in before.events if event.at < self.about.started - _AT_ONCE_S)


# ---- events as sentences ----------------------------------------------------------------------------
# Writes events of a run as sentences, from their kind and fields in the history (docs/robustness.md). Pure.


_GONE = {"finished": "finished", "failed": "failed", "closed": "is gone", "lease": "is gone",
         "replaced": "is gone: a newer process has its rank"}  # fmt: skip


def event(at: float, kind: str, rank: int | None, fields: Mapping[str, Any]) -> Event:
    """Returns the event with its sentence; `at` is in Unix seconds.

    The sentence of an unknown kind (from a newer version), or of an event that lacks a field, is the kind's name.
    """
    try:
        text = _sentence(kind, rank, fields)
    except (KeyError, TypeError, ValueError):
        text = kind
    return Event(at=at, kind=kind, text=text, rank=rank, fields=fields)


def _sentence(kind: str, rank: int | None, fields: Mapping[str, Any]) -> str:
    match kind:
        case "start":
            return f"continues from {fields['source']}" if fields["source"] else f"{fields['mode']}, from the beginning"
        case "join":
            again = "joined" if fields["incarnation"] == 1 else "joined again"
            return f"worker {rank} {'came back where it was' if fields['resumed'] else again}"
        case "leave":
            how = fields["how"]
            if how == "goodbye":
                return f"worker {rank} {'finished' if fields.get('finished') else 'left'}"
            why = f": {fields['reason']}" if fields.get("reason") else ""
            return f"worker {rank} {_GONE.get(how, how)}{why}"
        case "snapshot":
            return f"snapshot of version {fields['version']} in {fields['path']}"
        case "evaluated":
            metrics = ", ".join(f"{name} {short_number(value)}" for name, value in fields["metrics"].items())
            return f"step {fields['step']}: {metrics}{', the best so far' if fields.get('best') else ''}"
        case "control":
            return str(fields["result"]) if fields["done"] else f"{fields['do']} was refused: {fields['result']}"
        case "end":
            return str(fields.get("reason") or f"the run is over, at version {fields['version']}")
    return kind
