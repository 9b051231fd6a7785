"""The protocol of experiment trackers, and the sink that feeds one.

Only the server calls a tracker, once for each status and for any number of workers. A tracker that raises is switched
off with one warning, as every sink. To add a tracker, write a file in this folder whose `ENTRY` is a `Tracker`, and an
extra in pyproject.toml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ....common.config.schema import Config
from ....common.errors import UsageError
from ....common.registry import TRACKERS
from ....common.reporting.metrics import Display, Tense, shown_of_run, shown_of_workers
from ....common.reporting.summary import Status
from ...core.effects import Fact, MetricsTaken, RunStarted, StatusTaken
from .. import reports
from ..bus import Sink

Metrics = Mapping[str, float]

_MOST_WORKERS = 16  # workers that have separate metrics


class TrackedRun(NamedTuple):
    """Facts about the run, for the start of a tracker."""

    run: str  # the run's random name, which stays the same after a resume
    project: str
    folder: str  # for files
    config: dict[str, Any]  # what ran, as JSON, in sections
    step: int  # the training step from which the run continues; 0: a new run
    name: str  # to display


class Tracker(Protocol):
    """Sends metrics to an experiment tracker. One thread uses it.

    An exception ends only the tracker. The extra with the tracker's packages has the tracker's name.
    """

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue it after a resume. This is the first call."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record finite numbers at a training step. Steps decrease only if the server goes back to a snapshot."""

    def flush(self) -> None:
        """Send the recorded metrics, because no more are waiting."""

    def finish(self, step: int, metrics: Metrics, ended_by: str) -> None:
        """Record the results of the run, at its last step. `ended_by` is empty if all steps were taken."""


class TrackerSink(Sink):
    """Feeds one tracker, found by its name. Raises UsageError if its packages are not installed."""

    does_io = True
    close_s = 60.0  # some trackers first make tables, or send buffered metrics
    kinds = (RunStarted, StatusTaken, MetricsTaken)

    def __init__(self, name: str, config: Config) -> None:
        self.name = name  # type: ignore[misc]  # of this sink, not of the class
        self._config = config
        try:
            self._tracker: Tracker = TRACKERS.load(name)()
        except ModuleNotFoundError as error:
            fix = f"pip install 'paramserver[{name}]'; or leave {name} out of --track"
            raise UsageError(f"tracker {name}: the package {error.name} is not installed", fix=fix) from None
        self._from_step: int | None = None  # from which the run continues; None: that of the next status
        self._is_started = False
        self._step = 0  # the highest that was logged

    def take(self, at: float, fact: Fact) -> None:
        match fact:
            case RunStarted():
                self._from_step = None if fact.version else 0
            case StatusTaken(status):
                if self._from_step is None:
                    self._from_step = status.step
                if status.step > self._from_step:  # the first contribution says what runs
                    self._log(status.step, metrics_of(status))
            case MetricsTaken(point):
                self._log(point.step, {f"eval/{name}": metric for name, metric in point.metrics.items()})

    def _log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._start()
        self._step = max(self._step, step)
        self._tracker.log(step, _finite(metrics))

    def _start(self) -> None:
        """Start the tracker at the first metrics. This runs on the sink's thread, as a connection may take seconds."""
        if not self._is_started:
            output, mode, run = self._config.output, self._config.run.mode, self._run.name
            settings, self._step = reports.ran(self._engine).settings, self._from_step or 0
            name = output.name or f"{mode}-{run[:6]}"
            tracked = TrackedRun(run, output.project, output.track_dir, settings, self._step, name)
            self._tracker.start(tracked)
            self._is_started = True

    def flush(self) -> None:
        if self._is_started:
            self._tracker.flush()

    def close(self) -> None:
        summary = reports.summary(self._engine)  # the event loop waits for this thread, so the run no longer changes
        if not self._is_started and not summary.workers:
            return
        self._start()
        of_run = {metric.name: getattr(summary, metric.name) for metric in shown_of_run(Display.NOTEBOOK)}
        metrics = {f"final/{name}": value for name, value in (of_run | summary.final).items()}
        self._tracker.finish(self._step, _finite(metrics), summary.ended_by)


def metrics_of(status: Status) -> dict[str, float | None]:
    """Return the tracked metrics of a status: of the run, and of each of the first _MOST_WORKERS workers."""
    found = {f"train/{metric.name}": getattr(status, metric.name) for metric in shown_of_run(Display.TRACKERS)}
    found |= {f"recorded/{name}": value for name, value in status.recorded.items()}
    metrics = shown_of_workers(Display.TRACKERS)
    for worker in status.workers[:_MOST_WORKERS]:
        now = [metric for metric in metrics if metric.tense is Tense.DONE or worker.presence.is_live]
        found |= {f"worker{worker.rank}/{metric.name}": getattr(worker, metric.name) for metric in now}
    return found


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
