"""Keeps a run on record in the file of runs (`common/runstore`), for `ps-runs` and the page."""

from __future__ import annotations

import time

from ...common.config.schema import Config
from ...common.reporting.curve import Point
from ...common.runstore.record import Record
from ..core.effects import (
    ControlTaken,
    Evaluated,
    Fact,
    RunEnded,
    RunStarted,
    Seated,
    SnapshotTaken,
    StatusTaken,
    WorkerLeft,
)
from ..engine.engine import Engine
from . import reports
from .bus import Sink
from .history import line_of


class RecordingSink(Sink):
    """A run is on record from its first worker on: a server that nobody came to leaves nothing."""

    name = "store"
    does_io = True
    kinds = (RunStarted, Seated, WorkerLeft, Evaluated, ControlTaken, SnapshotTaken, StatusTaken, RunEnded)
    close_s = 10.0
    capacity = 1_000  # statuses of 64 workers

    def __init__(self, config: Config) -> None:
        self._config = config
        self._record: Record | None = None
        self._started: tuple[float, RunStarted] | None = None

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        self._unix_s = time.time() - engine.now()  # what is added to a fact's time

    def take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, RunStarted):
            self._started = at, fact
        elif isinstance(fact, Seated) and self._record is None and self._started is not None:
            started = self._started[1]
            self._record = Record(self._config, run=started.run, mode=started.mode, at_version=started.version)
            self._tell(self._record, *self._started)
        if self._record is not None and not self._record.is_off:
            self._tell(self._record, at, fact)

    def _tell(self, record: Record, at: float, fact: Fact) -> None:
        writer, at = record.writer, at + self._unix_s
        if isinstance(fact, StatusTaken):
            whole = self._engine.model.whole  # set once
            writer.model = whole.fingerprint if whole is not None else ""
            writer.status(at, fact.status)
        elif isinstance(fact, Evaluated):
            point = Point(
                step=fact.step, version=fact.version, elapsed_s=fact.elapsed_s, figures=fact.figures,
                samples=fact.samples,
            )  # fmt: skip
            writer.evaluation(point, self._engine.bytes_when.get(fact.version), fact.is_best)
            writer.event(at, "evaluated", None, {**point.model_dump(), "best": fact.is_best})
        else:
            if isinstance(fact, SnapshotTaken):
                writer.checkpoint(at, fact.version, fact.path, fact.sha256)
            kind, fields = line_of(fact)
            if isinstance(fact, WorkerLeft):
                fields["reason"] = fact.reason
            writer.event(at, kind, fields.pop("rank", None), fields)

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        """The event loop waits for this thread, and nothing moves any more."""
        if self._record is None:
            return
        at = self._engine.now() + self._unix_s
        self._record.writer.status(at, reports.status(self._engine), is_last=True)
        self._record.end(at, reports.summary(self._engine), self._ended_by())

    def _ended_by(self) -> str:
        """Who stopped it and why, or what failed; empty when all steps were taken."""
        run, finished = self._engine.run, self._engine.finished
        error = finished.exception() if finished.done() and not finished.cancelled() else None
        if run.ended_by or error is not None:
            return run.ended_by or str(error)
        return "" if finished.done() else "its server was told to stop"
