"""Keeps a run on record in the file of runs (`common/runstore`), for `ps-runs` and the page."""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...common.config.schema import Config
from ...common.errors import ParamServerError
from ...common.reporting.curve import Point
from ...common.reporting.log import get_logger
from ...common.runstore.process import commit_of, machine
from ...common.runstore.schema import FILE
from ...common.runstore.writing import Beginning, RunWriter
from ...common.version import PROGRAM_VERSION
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

log = get_logger()

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_PACKAGES = ("torch", "numpy", "grpcio")


class RecordingSink(Sink):
    """A run is on record from its first worker on: a server that nobody came to leaves nothing.

    Where the file cannot be made or written, this sink is off for the rest of the run: one line in the log, a warning
    but where it is the default that cannot be had. A file that others have locked is tried again with each status.
    """

    name = "store"
    does_io = True
    kinds = (RunStarted, Seated, WorkerLeft, Evaluated, ControlTaken, SnapshotTaken, StatusTaken, RunEnded)
    close_s = 10.0
    capacity = 1_000  # statuses of 64 workers

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = Path(config.output.track_dir) / FILE
        self._writer: RunWriter | None = None
        self._started: tuple[float, RunStarted] | None = None
        self._is_off = self._has_waited = False

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        self._unix_s = time.time() - engine.now()  # what is added to a fact's time

    def take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, RunStarted):
            self._started = at, fact
        elif isinstance(fact, Seated) and self._writer is None and self._started is not None:
            self._writer = RunWriter(self._path, _beginning(self._config, self._started[1]))
            self._tell(*self._started)
        if self._writer is not None and not self._is_off:
            self._tell(at, fact)

    def _tell(self, at: float, fact: Fact) -> None:
        writer, at = self._writer, at + self._unix_s
        assert writer is not None
        if isinstance(fact, StatusTaken):
            whole = self._engine.model.whole  # set once
            writer.model = whole.fingerprint if whole is not None else ""
            writer.status(at, fact.status)
        elif isinstance(fact, Evaluated):
            point = Point(step=fact.step, version=fact.version, elapsed_s=fact.elapsed_s, figures=fact.figures)
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
        if self._writer is not None and not self._is_off:
            self._do(self._writer.flush)

    def close(self) -> None:
        """The event loop waits for this thread, and nothing moves any more."""
        if self._writer is None:
            return
        if not self._is_off:
            writer, at = self._writer, self._engine.now() + self._unix_s
            writer.status(at, reports.status(self._engine), is_last=True)
            self._do(lambda: writer.end(at, reports.summary(self._engine), self._ended_by()), is_last=True)
        self._writer.close()

    def _ended_by(self) -> str:
        """Who stopped it and why, or what failed; empty when all steps were taken."""
        run, finished = self._engine.run, self._engine.finished
        error = finished.exception() if finished.done() and not finished.cancelled() else None
        if run.ended_by or error is not None:
            return run.ended_by or str(error)
        return "" if finished.done() else "its server was told to stop"

    def _do(self, write: Callable[[], bool], is_last: bool = False) -> None:
        """Nothing that the file does is the run's matter."""
        try:
            is_written = write()
        except (sqlite3.Error, OSError, ParamServerError) as error:
            self._is_off = True
            is_default = isinstance(error, OSError) and error.errno in _NOT_ALLOWED and not self._is_wanted
            tell = log.info if is_default else log.warning
            tell("store_off", path=str(self._path), reason=str(error), meaning="the run goes on, and is not on record")
            return
        if not is_written and (is_last or not self._has_waited):
            self._has_waited = True
            lost = "what was not written is lost" if is_last else "it is tried again with each status"
            log.warning("store_locked", path=str(self._path), meaning=f"another process has locked it; {lost}")

    @property
    def _is_wanted(self) -> bool:
        """Somebody has said that runs are kept, or where."""
        return not self._config.output.model_fields_set.isdisjoint({"store", "track_dir"})


def _beginning(config: Config, started: RunStarted) -> Beginning:
    script = config.launch.script
    return Beginning(
        run=started.run,
        mode=started.mode,
        work=f"script {Path(script).name}" if script is not None else config.task.name,
        project=config.output.project,
        version=started.version,
        beat_s=config.server.status_interval_s,
        config=config.model_dump(mode="json", exclude={"security"}),
        code={"paramserver": PROGRAM_VERSION, "commit": _commit()},
        machine=machine({name: _version(name) for name in _PACKAGES}),
    )


def _commit() -> str:
    try:
        return commit_of(Path.cwd())
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
