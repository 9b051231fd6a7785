"""What somebody who watches a run is told, a status at a time: one type from the server to the page and to programs.

A `Tick` is the status of the event bus with what has happened since the one before; `Watched` gathers ticks into what
a page needs that opens in the middle, and stays bounded however long the run is. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from .curve import Point
from .status import Status
from .summary import Cost, Summary

_MOST_ROWS = 1_000  # of the series; from twice as many on every second one goes
_MOST_EVENTS = 300
_MOST_SNAPSHOTS = 100
_MOST_SPANS = 4_000  # rows of the task stream
_AT_ONCE_S = 0.05  # within which a start is told to who keeps and to who shows


class Totals(BaseModel):
    """The run so far; at its end what the summary says, figure by figure."""

    wall_s: float = 0.0
    updates: int = 0
    samples: int | None = 0  # None: nobody said them
    bytes: int = 0  # both ways, framing included
    wait_share: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    cost: Cost | None = None
    final: dict[str, float] = Field(default_factory=dict)  # what the task's evaluation returned, at the end

    @classmethod
    def of(cls, summary: Summary) -> Totals:
        return cls(
            wall_s=summary.wall_s, updates=summary.updates, samples=summary.num_samples, bytes=summary.num_bytes,
            wait_share=summary.wait_share, staleness_mean=summary.staleness_mean, staleness_max=summary.staleness_max,
            cost=summary.cost, final=summary.final,
        )  # fmt: skip


class Happened(BaseModel):
    """Something that people want to know of, as a sentence."""

    at: float  # Unix seconds
    kind: str  # started, joined, left, snapshot, evaluated, control, ended
    text: str
    rank: int | None = None


class Snapshot(BaseModel):
    """What one moment of the run left on a disk."""

    version: int
    at: float  # Unix seconds
    path: str


class Span(BaseModel):
    """What a worker's time between two contributions went to, or between more where they come often: first waiting,
    then transfer, then computing. Rank -1 is the server: the time its tensor work took."""

    rank: int
    begin_s: float  # of the server's clock since the run began or went on
    wait_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    apply_s: float = 0.0


class Wait(BaseModel):
    """Who waits, for whom (empty: for nobody in particular), and why."""

    rank: int
    ranks: list[int] = Field(default_factory=list)
    why: str


class Tick(BaseModel):
    """A run at one moment, with what has happened since the tick before."""

    at: float  # Unix seconds
    clock_s: float = 0.0  # as in `Span`
    status: Status
    totals: Totals = Field(default_factory=Totals)
    staleness: dict[int, int] = Field(default_factory=dict)  # contributions by versions behind, of the whole run
    durable_version: int | None = None  # of the newest snapshot; None before the first
    waits: list[Wait] = Field(default_factory=list)
    spans: list[Span] = Field(default_factory=list)
    events: list[Happened] = Field(default_factory=list)
    evaluations: list[Point] = Field(default_factory=list)
    snapshots: list[Snapshot] = Field(default_factory=list)
    is_over: bool = False


class About(BaseModel):
    """Which run it is."""

    run: str
    mode: str = ""
    label: str = ""  # the mode with its options of now: `ssp (staleness 3)`
    task: str = ""
    started: float = 0.0  # Unix seconds
    server_incarnation: int = 1
    version: str = ""  # of the program
    settings: dict[str, Any] = Field(default_factory=dict)  # the configuration, of sections, with what was set since
    lr_scale: float = 1.0  # what the server's learning rate is multiplied by
    controls: list[str] = Field(default_factory=list)  # what may be asked of it


def _no_rows() -> dict[str, list[float | None]]:
    return {name: [] for name in COLUMNS}


COLUMNS = (
    "elapsed_s", "step", "version", "loss", "samples", "bytes", "samples_per_s", "wait_share", "staleness_mean",
)  # fmt: skip


class Line(BaseModel):
    """A run in a list."""

    run: str
    name: str | None = None  # that people gave it, or a short one
    project: str = ""
    mode: str = ""
    task: str = ""
    state: str = ""  # live: of this page's process; running, done, stopped, lost: on record; over
    started: float = 0.0  # Unix seconds
    workers: int = 0
    step: int = 0
    steps: int = 0  # 0: not known
    version: int = 0
    loss: float | None = None
    samples: int | None = 0
    samples_per_s: float | None = 0.0
    num_bytes: int | None = None
    elapsed_s: float | None = None  # of training
    figures: dict[str, float] = Field(default_factory=dict)  # final, or of the newest evaluation
    ended_by: str = ""


class Watched(BaseModel):
    """All that a page shows of one run."""

    about: About
    newest: Tick | None = None
    series: dict[str, list[float | None]] = Field(default_factory=_no_rows)
    evaluations: list[Point] = Field(default_factory=list)
    snapshots: list[Snapshot] = Field(default_factory=list)  # that are there, the oldest first
    events: deque[Happened] = Field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    spans: deque[Span] = Field(default_factory=lambda: deque(maxlen=_MOST_SPANS))

    def add(self, tick: Tick) -> None:
        self.newest = tick
        self.events.extend(tick.events)
        self.spans.extend(tick.spans)
        self.evaluations.extend(tick.evaluations)
        self.has_taken(tick.snapshots)
        if tick.status.workers or tick.status.step:
            self._add_row(tick)

    def has_taken(self, snapshots: Iterable[Snapshot]) -> None:
        """As many of them are there as are kept."""
        of_version = {one.version: one for one in (*self.snapshots, *snapshots)}
        most = self.about.settings.get("checkpoint", {}).get("keep") or _MOST_SNAPSHOTS
        self.snapshots = list(of_version.values())[-min(most, _MOST_SNAPSHOTS) :]

    def goes_on(self, before: Watched, version: int) -> None:
        """It was `before`, and goes on from `version`: what came later is computed again. Who keeps runs may have
        written the first things of this start already."""
        rows = [at for at, of in enumerate(before.series["version"]) if of is not None and of <= version]
        self.series = {name: [values[at] for at in rows] for name, values in before.series.items()}
        kept = [point for point in before.evaluations if point.version <= version]
        self.evaluations = kept if len(kept) >= len(self.evaluations) else self.evaluations
        self.has_taken(one for one in before.snapshots if one.version <= version)
        self.events.extend(one for one in before.events if one.at < self.about.started - _AT_ONCE_S)

    def _add_row(self, tick: Tick) -> None:
        status, totals = tick.status, tick.totals
        row = {
            "elapsed_s": status.elapsed_s, "step": status.step, "version": status.version, "loss": status.loss,
            "samples": totals.samples, "bytes": totals.bytes, "samples_per_s": status.samples_per_s,
            "wait_share": totals.wait_share, "staleness_mean": totals.staleness_mean,
        }  # fmt: skip
        for name, values in self.series.items():
            values.append(row[name])
        if len(self.series["step"]) >= 2 * _MOST_ROWS:
            self.series = {name: values[::2] for name, values in self.series.items()}
