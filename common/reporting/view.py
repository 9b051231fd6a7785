"""The state of a run for viewers: one type from the server to the dashboard and the run store.

A `Tick` is a status with the events since the tick before. A `View` collects ticks, so that a dashboard opened in the
middle of a run has all it needs. Its size is limited, however long the run is. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from pydantic import BaseModel, Field, model_validator

from .curve import Point, split_names
from .metrics import Display, Value, shown_of_run
from .pictures.words import short_number
from .summary import RECORDED, Cost, Status

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
