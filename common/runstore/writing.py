"""One run, written down while it goes on. Used by one thread, which may be held up by a disk.

What is told is kept until `flush`, one transaction. While others have locked the file it stays, within bounds: then
the oldest series go first. Of the series a bounded number is kept: when there are too many, every second one goes, and
from then on every second one is written (a run of a day has a row every two minutes).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..reporting.curve import Point
from ..reporting.status import Status
from ..reporting.summary import Summary
from ..wire.json_text import to_json
from .process import this_host, this_process
from .schema import open_to_write, stored
from .watching import FileWatch

_MOST_TICKS = 1024  # of a run; half as many after thinning
_MOST_EVENTS = 10_000
_MOST_PENDING = 2_000
_WAIT_S = 2.0  # for a file that others have locked; what is not written then is tried again
_LAST_WAIT_S = 5.0  # at the end

_OF_RUN = ("step", "version", "loss", "samples_per_s", "num_workers", "samples", "num_bytes", "waiting")
_OF_WORKER = (
    "rank", "state", "step", "lead", "loss", "samples_per_s", "compute_s", "transfer_s", "wait_s", "samples",
    "staleness_mean", "staleness_max", "bytes_sent", "bytes_received", "restarts", "waiting_for", "lane", "codec",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What is known of a run when it begins, or goes on from `version`."""

    run: str
    mode: str
    work: str  # the task, or the script
    project: str
    version: int
    beat_s: float  # at least so often it is heard of
    config: Mapping[str, Any]  # resolved, as JSON
    code: Mapping[str, Any]
    machine: Mapping[str, Any]


class RunWriter:
    """Writes one run to `path`. All but `flush` and `end` only keep what they are told; these raise sqlite3.Error,
    OSError or ParamServerError, and after that it is of no use any more."""

    def __init__(self, path: Path, beginning: Beginning) -> None:
        self._path = path
        self._beginning = beginning
        self._db: sqlite3.Connection | None = None  # once the run is on record
        self._watch: FileWatch | None = None  # of the file that is open
        self._key = 0
        self._tick = 0  # of the newest status
        self._num_kept = 0  # ticks in the file
        self._stride = 1
        self._num_events = 0
        self._pending: list[Callable[[sqlite3.Connection], object]] = []
        self.model = ""  # of which the run trains: what tells it from others

    # ---- what is told: times `at` in Unix seconds ------------------------------------------------

    def status(self, at: float, status: Status, is_last: bool = False) -> None:
        """Where the run stands. Of these a bounded number is kept, and the last."""
        self._pending.append(partial(self._put_status, at, status, is_last))

    def event(self, at: float, kind: str, rank: int | None, fields: Mapping[str, Any]) -> None:
        self._pending.append(partial(self._put_event, at, kind, rank, fields))

    def evaluation(self, point: Point, num_bytes: int | None, is_best: bool) -> None:
        """`num_bytes`: that were exchanged until then."""
        self._pending.append(partial(self._put_evaluation, point, num_bytes, is_best))

    def checkpoint(self, at: float, version: int, path: str, sha256: str) -> None:
        row = {"version": version, "at": at, "path": path, "sha256": sha256}
        self._pending.append(lambda db: self._insert(db, "checkpoints", tuple(row), [list(row.values())]))

    # ---- to the file -----------------------------------------------------------------------------

    def flush(self) -> bool:
        """All that has been told, in one transaction; False while others have locked the file."""
        try:
            if self._db is None:
                self._db = self._begun()
                self._watch = FileWatch(self._path)
            if self._pending and self._watch is not None:
                self._watch.look()
                self._write(self._db)
                self._watch.wrote()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            self._make_room()
            return False
        return True

    def end(self, at: float, summary: Summary, ended_by: str) -> bool:
        """What the run came to, for good: on the disk when this returns True."""
        self._pending.append(partial(self._put_end, at, summary, ended_by))
        if self._db is not None:
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * _LAST_WAIT_S)}")
            self._db.execute("PRAGMA synchronous = FULL")
        return self.flush()

    def close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _begun(self) -> sqlite3.Connection:
        db = open_to_write(self._path, _WAIT_S)
        try:
            db.execute("BEGIN IMMEDIATE")
            self._put_on_record(db)
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _write(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            for put in self._pending:
                put(db)
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # some errors have rolled back already
                db.execute("ROLLBACK")
            raise
        self._pending = []

    def _make_room(self) -> None:
        """Series may be lost where the file stays locked, other things not; they are few."""
        if len(self._pending) > _MOST_PENDING:
            half, rest = self._pending[: _MOST_PENDING // 2], self._pending[_MOST_PENDING // 2 :]
            kept = [put for put in half if getattr(put, "func", None) != self._put_status]
            self._pending = [*kept, *rest]

    # ---- rows, within a transaction --------------------------------------------------------------

    def _put_on_record(self, db: sqlite3.Connection) -> None:
        """A run that goes on loses what it had beyond the version that it goes on from."""
        of = self._beginning
        db.execute(
            "INSERT INTO runs (id, project, mode, work, starts, started_at, heard_at, beat_s, host, process) "
            "VALUES (:run, :project, :mode, :work, 1, :at, :at, :beat_s, :host, :process) "
            "ON CONFLICT (id) DO UPDATE SET starts = starts + 1, ended_at = NULL, ended_by = '', mode = :mode, "
            "heard_at = :at, beat_s = :beat_s, host = :host, process = :process, version = :version",
            {
                "run": of.run, "project": of.project, "mode": of.mode, "work": of.work, "at": time.time(),
                "beat_s": of.beat_s, "host": this_host(), "process": this_process(), "version": of.version,
            },
        )  # fmt: skip
        self._key, self._stride = db.execute("SELECT key, stride FROM runs WHERE id = ?", (of.run,)).fetchone()
        for table in ("series", "evaluations", "checkpoints"):
            db.execute(f"DELETE FROM {table} WHERE run = ? AND version > ?", (self._key, of.version))
        self._tick, self._num_kept = self._one(db, "SELECT coalesce(max(tick), 0), count(*) FROM series WHERE run = ?")
        (self._num_events,) = self._one(db, "SELECT coalesce(max(number), 0) FROM events WHERE run = ?")
        db.execute("DELETE FROM worker_series WHERE run = ? AND tick > ?", (self._key, self._tick))
        db.execute("DELETE FROM documents WHERE run = ? AND name = 'summary'", (self._key,))
        told = {"config": of.config, "machine": of.machine, "code": of.code}
        self._insert(db, "documents", ("name", "body"), [[name, to_json(body)] for name, body in told.items()])

    def _put_status(self, at: float, status: Status, is_last: bool, db: sqlite3.Connection) -> None:
        self._tick += 1
        told = {
            "step": status.step, "version": status.version, "loss": status.loss, "num_workers": status.num_joined,
            "samples_per_s": status.samples_per_s, "samples": status.samples, "num_bytes": status.num_bytes,
            "waiting": status.waiting_reason(),
        }  # fmt: skip
        values = [stored(name, told[name]) for name in _OF_RUN]
        sets = ", ".join(f"{name} = ?" for name in (*_OF_RUN, "elapsed_s", "steps", "heard_at", "model", "mode"))
        now = [*values, status.elapsed_s, status.steps, at, self.model, status.mode or self._beginning.mode]
        db.execute(f"UPDATE runs SET {sets} WHERE key = ?", [*now, self._key])
        if self._tick % self._stride and not is_last:
            return
        self._insert(db, "series", ("tick", "at", "elapsed_s", *_OF_RUN), [[self._tick, at, status.elapsed_s, *values]])
        rows = [
            [self._tick, *(stored(name, getattr(worker, name)) for name in _OF_WORKER)] for worker in status.workers
        ]
        self._insert(db, "worker_series", ("tick", *_OF_WORKER), rows)
        self._num_kept += 1
        if self._num_kept >= _MOST_TICKS:
            self._thin(db)

    def _thin(self, db: sqlite3.Connection) -> None:
        self._stride *= 2
        for table in ("series", "worker_series"):
            db.execute(f"DELETE FROM {table} WHERE run = ? AND tick % ?", (self._key, self._stride))
        (self._num_kept,) = self._one(db, "SELECT count(*) FROM series WHERE run = ?")
        db.execute("UPDATE runs SET stride = ? WHERE key = ?", (self._stride, self._key))

    def _put_event(
        self, at: float, kind: str, rank: int | None, fields: Mapping[str, Any], db: sqlite3.Connection
    ) -> None:
        self._num_events += 1
        row = [self._num_events, at, kind, rank, to_json(fields)]
        self._insert(db, "events", ("number", "at", "kind", "rank", "fields"), [row])
        if (oldest := self._num_events - _MOST_EVENTS) > 0:
            db.execute("DELETE FROM events WHERE run = ? AND number <= ?", (self._key, oldest))

    def _put_evaluation(self, point: Point, num_bytes: int | None, is_best: bool, db: sqlite3.Connection) -> None:
        columns = ("version", "step", "elapsed_s", "num_bytes", "is_best", "figures")
        figures = to_json(point.figures)
        row = [point.version, point.step, point.elapsed_s, num_bytes, is_best, figures]
        self._insert(db, "evaluations", columns, [row])
        db.execute("UPDATE runs SET figures = ? WHERE key = ?", (figures, self._key))

    def _put_end(self, at: float, summary: Summary, ended_by: str, db: sqlite3.Connection) -> None:
        self._insert(db, "documents", ("name", "body"), [["summary", summary.text()]])
        # Of those that took part: at the end no worker is left.
        told = [at, at, ended_by, to_json(summary.final), summary.version, len(summary.workers), self._key]
        sets = "ended_at = ?, heard_at = ?, ended_by = ?, figures = ?, version = ?, num_workers = ?"
        db.execute(f"UPDATE runs SET {sets} WHERE key = ?", told)

    def _insert(
        self, db: sqlite3.Connection, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT OR REPLACE INTO {table} (run, {', '.join(columns)}) VALUES ({self._key}, {marks})"
        db.executemany(statement, rows)

    def _one(self, db: sqlite3.Connection, question: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] = db.execute(question, (self._key,)).fetchone()
        return found
