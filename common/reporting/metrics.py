"""The table of metrics: each number of a worker or of a run, declared once.

Prometheus, the dashboard, the terminal, the summary, reports, notebooks, trackers, the run store, `ps-runs` and the
Status call read this table. If the server has the value, a new metric is one `register(Metric(...))`. No message and no
other file changes:

    register(Metric("dropped", "dropped", "Contributions that came after their round had closed.",
                    read=lambda worker: worker.stats.dropped, over_workers=Fold.SUM, over_time=Fold.SUM))

`display` names the places where it is displayed (`Display`); by default it is everywhere. If only the worker's process
has the value, add it to `Readings` too (worker/training/readings.py), and register it with `_measured`.

A server calls `read`: for a metric of a worker with a `WorkerSource` (ps/core/counting.py), which has the
rank's `stats`, its `traffic` and the policy; for a metric of the run with the engine. A simulation calls it with the
same source. Everywhere else a metric is a value under its name. None means that the value is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from .pictures.words import duration, share, short_number, size
from .usage import HERE

Number = TypeVar("Number", int, float)
Value = int | float | None
Row = Mapping[str, Value]


class Unit(Enum):
    """The unit of a metric, which decides how it is written. The dashboard knows units by their value."""

    COUNT = "count"
    RATE = "rate"  # in a second
    SECONDS = "seconds"
    DURATION = "duration"  # seconds, written as `3 min 20 s`
    BYTES = "bytes"
    SHARE = "share"  # part of a whole, 0 to 1
    MEAN = "mean"  # of counts, written with two decimals
    NUMBER = "number"  # such as a loss


class Fold(Enum):
    """How values add up: over workers to the value of the run, and over time."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"  # over time: the newest counts
    DERIVED = "derived"  # over workers: from the other metrics of the run, as from those of a worker


class Tense(Enum):
    """What a worker's metric speaks of, which decides the workers that it folds over (`folded`)."""

    DONE = "done"  # in all, such as samples
    NOW = "now"  # such as a rate; a worker that does not train has none
    LAST = "last"  # the newest value, such as a loss


class Display(Flag):
    """Where a metric is displayed. Status call, status lines and run store have all metrics of a worker."""

    NOWHERE = 0
    DASHBOARD = auto()
    CURVES = auto()  # of the dashboard, selected by its user
    TERMINAL = auto()  # the live table
    TRACKERS = auto()
    PROMETHEUS = auto()
    SUMMARY = auto()  # the table at the end of a run
    REPORT = auto()  # columns and bars of a comparison
    NOTEBOOK = auto()
    STATUS = DASHBOARD | CURVES | TERMINAL | TRACKERS
    RESULTS = SUMMARY | REPORT | NOTEBOOK
    EVERYWHERE = STATUS | PROMETHEUS | RESULTS


@dataclass(frozen=True)
class Metric:
    """One metric. Either `read` takes it from a server, or `derive` computes it from metrics above it in the table."""

    name: str
    label: str  # heading of a column
    help: str  # a sentence
    unit: Unit = Unit.COUNT
    read: Callable[[Any], Value] | None = None
    derive: Callable[[Row], Value] | None = None
    of_run: bool = False  # a metric of the run; else of a worker
    over_workers: Fold | None = None  # how a worker's metric adds up; None: the run has no such metric
    over_time: Fold = Fold.LAST
    display: Display = Display.EVERYWHERE
    display_run: Display | None = None  # for the run's value from `over_workers`; None: as `display`
    tense: Tense = Tense.DONE
    default: Value = 0  # if no value was given
    rate_of: str = ""  # the metric above it whose rate it is: where that is unknown, a rate of 0 is unknown too
    is_rare: bool = False  # tables omit it if it is 0 for all
    differs_from: str = ""  # tables omit it if it equals this other metric for all

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus, where units are written out."""
        base = self.name.removesuffix("_s") + "_seconds" if self.unit in (Unit.SECONDS, Unit.DURATION) else self.name
        return f"paramserver_{base}" if self.of_run else f"paramserver_worker_{base}"

    def text(self, value: Value) -> str:
        """The value for people; `-` where it is unknown."""
        return "-" if value is None else _WRITTEN[self.unit](value)


def rate(value: float) -> str:
    """Returns a rate as text, with one decimal below 100."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


_WRITTEN: dict[Unit, Callable[[float], str]] = {
    Unit.COUNT: lambda value: f"{value:,.0f}",
    Unit.RATE: rate,
    Unit.SECONDS: lambda value: f"{value:,.1f}",
    Unit.DURATION: duration,
    Unit.BYTES: size,
    Unit.SHARE: share,
    Unit.MEAN: lambda value: f"{value:.2f}",
    Unit.NUMBER: short_number,
}

OF_WORKER: dict[str, Metric] = {}
OF_RUN: dict[str, Metric] = {}


def register(metric: Metric) -> None:
    """Add a metric to the table. A worker's metric with `over_workers` becomes a metric of the run too."""
    if not metric.of_run:
        OF_WORKER[metric.name] = metric
    if metric.of_run or metric.over_workers is not None:
        shown = metric.display if metric.display_run is None else metric.display_run
        OF_RUN[metric.name] = replace(metric, display=shown)


def shown_of_workers(where: Display) -> list[Metric]:
    """The metrics of a worker that are displayed there, in the order of the table."""
    return [metric for metric in OF_WORKER.values() if metric.display & where]


def shown_of_run(where: Display) -> list[Metric]:
    """The metrics of the run that are displayed there, in the order of the table."""
    return [metric for metric in OF_RUN.values() if metric.display & where]


def values_of(metrics: Iterable[Metric], source: Any) -> dict[str, Value]:
    """Read the metrics from a source of the server, rounded to what is worth sending; what is now, of live workers."""
    found: dict[str, Value] = {}
    for metric in metrics:
        if metric.read is not None and (metric.tense is not Tense.NOW or source.presence.is_live):
            value = metric.read(source)
            found[metric.name] = round(value, 6) if isinstance(value, float) else value
    return found


def completed(metrics: Iterable[Metric], row: Row) -> dict[str, Value]:
    """The row with the metrics that it lacks: derived from the others, or their default."""
    found: dict[str, Value] = {}
    for metric in metrics:
        made = metric.default if metric.derive is None or metric.name in row else metric.derive(found)
        value = row.get(metric.name, made)
        found[metric.name] = None if metric.rate_of and not value and found[metric.rate_of] is None else value
    return found


def total_or_unknown(values: Iterable[Number | None]) -> Number | None:
    """Returns the sum; None if a value is unknown."""
    known = list(values)
    return None if None in known else sum(known)  # type: ignore[arg-type]  # there is no None


def _ratio(part: Value, whole: Value) -> Value:
    return part / whole if part and whole else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_TIMES = ("compute_s", "transfer_s", "wait_s")


def _of_time(name: str) -> Callable[[Row], Value]:
    """Derives a kind of time as a share of the recent time of live workers; without any, of all time."""

    def share_of(row: Row) -> Value:
        recent = sum(row.get(f"recent_{time}") or 0.0 for time in _TIMES)
        return _ratio(row[f"recent_{name}"], recent) if recent else part_of_time(row, name)

    return share_of


def part_of_time(row: Row, name: str) -> Value:
    """Returns a kind of time as a share of all time of the workers."""
    return _ratio(row[name], total_or_unknown([row[time] for time in _TIMES]))


# ---- the table ------------------------------------------------------------------------------------------

_LIVE = Display.DASHBOARD | Display.TERMINAL | Display.TRACKERS
_TABLE = Display.SUMMARY | Display.PROMETHEUS
_MEASURED = Display.DASHBOARD | Display.TRACKERS | Display.PROMETHEUS
_CURVED = Display.CURVES | Display.TRACKERS
_COMPARED = Display.DASHBOARD | Display.TRACKERS | Display.REPORT | Display.NOTEBOOK
_NOWHERE, _DASHBOARD, _TERMINAL, _SUMMARY = Display.NOWHERE, Display.DASHBOARD, Display.TERMINAL, Display.SUMMARY


def _counted(name: str, label: str, text: str, unit: Unit = Unit.COUNT, of: str = "", **options: Any) -> Metric:
    """A sum in the statistics of a rank, or in the attribute `of` of its source."""
    folds = {"over_workers": Fold.SUM, "over_time": Fold.SUM}
    kept = {"read": attrgetter(of or f"stats.{name}"), **folds, "display": _TABLE, "display_run": _NOWHERE}
    return Metric(name, label, text, unit, **{**kept, **options})


def _of_run(name: str, label: str, text: str, unit: Unit = Unit.COUNT, of: str = "", **options: Any) -> Metric:
    """A metric of the run. `of`: an attribute of the engine that has it, if it needs no `read`."""
    kept = {"display": Display.PROMETHEUS, "read": attrgetter(of) if of else None}
    return Metric(name, label, text, unit, of_run=True, **{**kept, **options})


_RARE: dict[str, Any] = {"is_rare": True, "over_workers": None}


def _recent(name: str, text: str) -> Metric:
    """Seconds of a kind within the time of `samples_per_s`; the shares of a live worker are of these."""
    read = lambda worker: worker.recent_s[_TIMES.index(name)]  # noqa: E731
    return Metric(f"recent_{name}", f"recent {name}", text, Unit.SECONDS, read=read, over_workers=Fold.SUM,
                  tense=Tense.NOW, display=Display.NOWHERE)  # fmt: skip


def _measured(name: str, label: str, text: str, unit: Unit, **options: Any) -> Metric:
    """A metric that a worker's process measures and sends with its heartbeats; the run has the mean."""
    kept = {"tense": Tense.NOW, "over_workers": Fold.MEAN, "display": _MEASURED, "display_run": _CURVED}
    read = lambda worker: worker.traffic.measured.get(name)  # noqa: E731
    return Metric(name, label, text, unit, read=read, default=None, is_rare=True, **{**kept, **options})


_RELAY: dict[str, Any] = {
    "over_workers": Fold.SUM, "tense": Tense.LAST,
    "display": _MEASURED | _SUMMARY, "display_run": _CURVED | Display.REPORT,
}  # fmt: skip

_METRICS = (
    # Of the run. A server reads them; those without `read` are fields of its summary.
    _of_run("wall_s", "wall s", "Seconds from the first weights to the last contribution.", Unit.SECONDS,
            display=Display.REPORT | Display.NOTEBOOK),
    _of_run("step", "step", "Training steps behind the slowest worker.",
            of="run.policy.min_steps_done", display=_LIVE | Display.PROMETHEUS),
    _of_run("steps", "steps", "Training steps of each worker; 0: no limit, until the script ends.",
            read=lambda engine: engine.run.policy.training_steps or 0, display=_TERMINAL | Display.PROMETHEUS),
    _of_run("version", "version", "Version of the weights: number of updates since the run began.",
            of="run.policy.version", display=Display.EVERYWHERE),
    _of_run("elapsed_s", "time", "Seconds of training, over all starts of the server.", Unit.DURATION,
            read=lambda engine: engine.elapsed_s(), display=_LIVE | Display.PROMETHEUS),
    _of_run("num_workers", "workers", "Workers that have joined and have not left.",
            read=lambda engine: len(engine.run.roster.workers), display=_LIVE),
    _of_run("live_workers", "training", "Workers that the mode has admitted and that have not left.",
            read=lambda engine: len(engine.run.policy.members)),
    _of_run("min_workers", "at least", "Workers below which training pauses.", of="config.policy.min_workers"),
    _of_run("longest_wait_s", "longest wait", "Seconds that the longest-waiting worker has waited.", Unit.SECONDS,
            read=lambda engine: engine.run.roster.longest_wait_s(engine.now())),
    _of_run("durable_version", "durable", "Version of the newest snapshot; 0 without one.",
            of="run.rhythm.durable_version"),
    _of_run("incarnation", "start", "Number of server starts in this run, from 1.", of="run.incarnation"),
    _of_run("staged_uploads", "staged", "Uploads in memory.",
            read=lambda engine: engine.model.staging.num_lent if engine.model.has_weights else 0),
    _of_run("staged_uploads_limit", "may be staged", "Most uploads in memory at once.", of="config.server.max_staged"),
    _of_run("waiting_uploads", "wait for memory", "Uploads that wait for memory.",
            read=lambda engine: engine.model.staging.num_waiting if engine.model.has_weights else 0),
    _of_run("model_bytes", "model", "Size of the model.", Unit.BYTES,
            read=lambda engine: engine.model.layout.total_bytes if engine.model.has_model else 0),
    _of_run("union_steps_per_s", "steps/s", "Steps of the union batch per second.", Unit.RATE, display=Display.REPORT),
    # Of a worker; most of them add up to a value of the run.
    Metric("step", "step", "Training steps of this rank that count.", read=attrgetter("row.steps"), display=_LIVE),
    Metric("lead", "lead", "Training steps ahead of the slowest live worker.", read=attrgetter("lead"), display=_LIVE),
    _counted("training_steps", "steps", "Steps behind the worker: its own, and those it missed.", of="row.steps"),
    _counted("contributions", "contributions", "Accepted contributions; with local steps each has several steps.",
             of="row.seq", display=_TABLE | _DASHBOARD, differs_from="training_steps"),
    _counted("samples", "samples", "Samples in accepted contributions.", of="row.samples",
             display=_TABLE | _DASHBOARD, display_run=_DASHBOARD | Display.TRACKERS | Display.NOTEBOOK),
    Metric("loss", "loss", "Mean training loss of the newest contribution.", Unit.NUMBER, default=None,
           read=lambda worker: _finite(worker.stats.loss), over_workers=Fold.MEAN, tense=Tense.LAST,
           display=_LIVE | Display.PROMETHEUS, display_run=_LIVE | Display.NOTEBOOK),
    Metric("samples_per_s", "samples/s", "Samples per second until now; of a finished run: the mean.", Unit.RATE,
           read=lambda worker: worker.samples_per_s, over_workers=Fold.SUM, tense=Tense.NOW,
           rate_of="samples", display=_LIVE, display_run=_LIVE | Display.REPORT | Display.NOTEBOOK),
    _counted("compute_s", "compute s", "Seconds spent in forward and backward.", Unit.SECONDS),
    _counted("transfer_s", "transfer s", "Seconds spent in exchanges, without waits for the mode.", Unit.SECONDS),
    _counted("wait_s", "wait s", "Seconds spent waiting for the mode or for an open round.", Unit.SECONDS, of="wait_s"),
    _recent("compute_s", "Seconds of computing of late."),
    _recent("transfer_s", "Seconds of transfer of late."),
    _recent("wait_s", "Seconds of waiting of late, also of a wait that goes on."),
    Metric("compute_share", "compute", "Computing as a share of the worker's time.", Unit.SHARE,
           derive=_of_time("compute_s"), display=_TERMINAL | Display.TRACKERS),
    Metric("transfer_share", "transfer", "Transfer as a share of the worker's time.", Unit.SHARE,
           derive=_of_time("transfer_s"), display=_TERMINAL | Display.TRACKERS),
    Metric("wait_share", "waiting", "Waiting as a share of the workers' time.", Unit.SHARE,
           derive=_of_time("wait_s"), over_workers=Fold.DERIVED, display=_TERMINAL | Display.TRACKERS,
           display_run=_COMPARED),
    _counted("staleness_sum", "staleness", "Staleness of accepted contributions, added up.", display=_NOWHERE),
    Metric("staleness_mean", "stale mean", "Mean staleness of accepted contributions, in versions.", Unit.MEAN,
           derive=lambda row: _ratio(row["staleness_sum"], row["contributions"]), over_workers=Fold.DERIVED,
           display=_DASHBOARD | _SUMMARY, display_run=_COMPARED),
    _counted("staleness_max", "stale max", "Largest staleness of an accepted contribution, in versions.",
             over_workers=Fold.MAX, over_time=Fold.MAX, display=_DASHBOARD | _SUMMARY, display_run=_COMPARED),
    _counted("lead_max", "lead max", "Largest lead after one of the worker's contributions.",
             over_workers=None, over_time=Fold.MAX, display=_SUMMARY),
    _counted("bytes_sent", "sent", "Bytes from the worker to the server, framing included.", Unit.BYTES,
             of="bytes_sent", display=_TABLE | _DASHBOARD),
    _counted("bytes_received", "received", "Bytes from the server to the worker, framing included.", Unit.BYTES,
             of="bytes_received", display=_TABLE | _DASHBOARD),
    Metric("num_bytes", "traffic", "Bytes between workers and server, both ways.", Unit.BYTES,
           derive=lambda row: total_or_unknown([row["bytes_sent"], row["bytes_received"]]), over_workers=Fold.DERIVED,
           display=_NOWHERE, display_run=_COMPARED),
    _counted("peer_bytes", "peer traffic", "Bytes sent to other workers; of the run: the mean of its workers.",
             Unit.BYTES, of="traffic.num_peers", over_workers=Fold.MEAN, is_rare=True, display_run=Display.REPORT),
    _counted("restarts", "restarts", "New processes of the rank after its first process.", **_RARE,
             read=lambda worker: max(0, worker.stats.num_joins - 1), display=_TABLE | _DASHBOARD),
    _counted("dropped", "dropped", "Contributions that came after their round had closed.", **_RARE),
    _counted("rejected", "rejected", "Contributions with NaN or Inf, or beyond store.max_norm.", **_RARE),
    _counted("skipped", "skipped", "Steps whose contribution was not applied, because of such values.", **_RARE),
    _counted("clipped", "clipped", "Contributions applied with such values set to 0, or scaled down.", **_RARE),
    _counted("residual_norm", "residual norm", "Norm of the residual of the worker's codec.", Unit.NUMBER, **_RARE,
             of="stats.residual", over_time=Fold.LAST),
    _counted("residuals_lost", "residuals lost", "Losses of the residual: a new process, a START, NaN.", **_RARE),
    _counted("residual_lost_norm", "lost norm", "Norms of the lost residuals, added up.", Unit.NUMBER,
             of="stats.residual_lost", **_RARE),
    _measured("learning_rate", "learning rate", "Rate of the first parameter group.", Unit.NUMBER, tense=Tense.LAST),
    _measured("grad_norm", "gradient norm", "Norm of its gradient in a recent step.", Unit.NUMBER, tense=Tense.LAST),
    _measured("cpu", "CPU", "Recent CPU time of the process as a share of one core.", Unit.SHARE),
    _measured("memory_bytes", "memory", "Resident memory of the process.", Unit.BYTES),
    _measured("gpu", "GPU", "Use of its GPU as NVML reports it (nvidia-ml-py).", Unit.SHARE),
    _measured("gpu_bytes", "GPU memory", "Memory that torch has reserved on its GPU.", Unit.BYTES),
    _measured("region_workers", "in region", "Workers of the region behind this relay.", Unit.COUNT, **_RELAY),
    _measured("region_ahead", "ahead", "Steps that the region is ahead of the last reply to its relay.", Unit.COUNT,
              **_RELAY | {"over_workers": Fold.MAX}),
    _measured("region_bytes", "within", "Bytes between the region's workers and its relay, both ways.", Unit.BYTES,
              **_RELAY | {"tense": Tense.DONE}),
    _measured("region_staleness", "stale within", "Mean staleness within the region, in versions of its relay.",
              Unit.MEAN, **_RELAY | {"over_workers": Fold.MEAN}),
    _of_run("server_cpu", "server CPU", "Recent CPU time of the server (shard 0) as a share of one core.", Unit.SHARE,
            read=lambda _: HERE.cpu(), default=None, display=_CURVED | Display.PROMETHEUS),
    _of_run("server_memory_bytes", "server memory", "Resident memory of the server (shard 0).", Unit.BYTES,
            read=lambda _: HERE.memory(), default=None, display=_CURVED | Display.PROMETHEUS),
    _of_run("bytes_per_worker", "traffic/worker", "Bytes between one worker and the server, both ways.", Unit.BYTES,
            display=Display.REPORT),
)  # fmt: skip

for _metric in _METRICS:
    register(_metric)


# ---- of the ranks, of the run --------------------------------------------------------------------
# The numbers of a run from those of its ranks: the only place where they are added up. Pure.
#
# | a metric says (`Tense`) | it folds over |
# |---|---|
# | what was done: samples, bytes, contributions | all ranks, also those that are gone |
# | what is done now: rates, CPU, the shares of recent time | live ranks that still train |
# | what was seen last: losses, learning rates, what scripts record | those; when none is left, those that were last |
#
# The ranks that were last are those that left in good order; if all were lost, the one that contributed last.


class Presence(NamedTuple):
    """Whether a rank takes part now. `is_live`: it trains and has not finished; `last_at`: of its contributions."""

    is_live: bool = True
    is_lost: bool = False  # it left, and not in good order
    last_at: float = 0.0


class Present(Protocol):
    @property
    def presence(self) -> Presence: ...

    @property
    def recorded(self) -> Any: ...


Rank = TypeVar("Rank", bound=Present)


def folded(ranks: Sequence[Rank], value: Callable[[Metric, Rank], Value]) -> dict[str, Value]:
    """Returns the metrics of the run that add up over ranks. `value` gives a metric of a rank."""
    over = {tense: taking_part(ranks, tense) for tense in Tense}
    return {
        metric.name: _FOLDED[metric.over_workers]([value(metric, rank) for rank in over[metric.tense]])
        for metric in OF_WORKER.values()
        if metric.over_workers in _FOLDED
    }


def mean_recorded(ranks: Sequence[Rank]) -> dict[str, float]:
    """Returns the mean of each metric that scripts record, over the ranks that have it."""
    values: dict[str, list[float]] = {}
    for rank in taking_part(ranks, Tense.LAST):
        for name, value in rank.recorded.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def with_mean_rate(row: Mapping[str, Value], wall_s: float) -> dict[str, Value]:
    """Returns the results of a rank with its rate over the whole run."""
    samples = row["samples"]
    return {**row, "samples_per_s": None if samples is None else round(samples / wall_s, 6) if wall_s > 0 else 0.0}


def taking_part(ranks: Sequence[Rank], tense: Tense) -> Sequence[Rank]:
    """Returns the ranks that a metric of this tense folds over."""
    if tense is Tense.DONE:
        return ranks
    live = [rank for rank in ranks if rank.presence.is_live]
    if live or tense is Tense.NOW:
        return live
    if left_well := [rank for rank in ranks if not rank.presence.is_lost]:
        return left_well
    newest = max((rank.presence.last_at for rank in ranks), default=0.0)
    return [rank for rank in ranks if rank.presence.last_at == newest]


def _mean(values: list[Value]) -> Value:
    """Returns the mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _maximum(values: list[Value]) -> Value:
    return max((value for value in values if value is not None), default=0)


_FOLDED: dict[Fold | None, Callable[[list[Value]], Value]] = {
    Fold.SUM: total_or_unknown, Fold.MEAN: _mean, Fold.MAX: _maximum,
}  # fmt: skip
