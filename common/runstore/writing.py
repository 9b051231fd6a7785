"""Writes one run into the run store while it is in progress. One thread uses it, and may block on the disk.

The writer keeps ticks in memory until `flush`, which is one transaction. While other processes lock the file, ticks
stay in memory. Above a limit the writer drops the oldest statuses. The series has a limited number of rows: when it is
full, the writer deletes every second row and stores every second status from then on. A run of a day has a row every
two minutes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import ParamServerError
from ..reporting.summary import Summary
from ..reporting.view import Tick
from ..wire.json_text import to_json
from .process import still_writes, this_host, this_process
from .ran import Ran
from .schema import open_to_write
from .watching import FileWatch

_MOST_TICKS = 1024  # of a run; half as many after thinning
_MOST_EVENTS = 10_000
_MOST_PENDING = 2_000
_WAIT_S = 2.0  # for a locked file; the next flush tries again
_LAST_WAIT_S = 5.0  # at the end
_FIX = "give each run its own --checkpoint-dir, and each machine its own output.track_dir"

_OF_WORKER = ("rank", "state", "waiting_for", "transport", "transport_reason", "codec")


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The description of a run when it begins, or continues from `version`."""

    run: str
    mode: str
    project: str
    version: int
    heartbeat_s: float  # longest time between two updates of `heard_at`
    code: Mapping[str, Any]
    machine: Mapping[str, Any]
    name: str | None = None
    note: str = ""


class RunWriter:
    """Writes one run to `path`.

    `flush` and `end` raise sqlite3.Error, OSError or ParamServerError. After an error, close the writer.
    """

    def __init__(self, path: Path, beginning: Beginning) -> None:
        self._path = path
        self._beginning = beginning
        self._db: sqlite3.Connection | None = None  # once the run is in the file
        self._watch: FileWatch | None = None  # of the file that is open
        self._key = 0
        self._tick = 0  # of the newest status
        self._num_kept = 0  # ticks in the file
        self._stride = 1
        self._num_events = 0
        self._pending: list[Tick] = []
        self._ending: tuple[Summary, str] | None = None  # results, and who stopped the run
        self._num_skipped = 0  # pending ticks, from the first, whose status is not kept
        self.model = ""  # fingerprint of the model that the run trains
        self.obstacle = ""  # another process that writes the run
        self.ran = Ran()  # written with the next tick
        self._written = Ran()

    def add(self, tick: Tick) -> None:
        """Keep a tick for the next `flush`."""
        self._pending.append(tick)

    # ---- to the file -----------------------------------------------------------------------------

    def flush(self) -> bool:
        """Write all pending ticks in one transaction. Returns False while another process locks the file or the run."""
        try:
            if self._db is None:
                if (begun := self._begun()) is None:
                    self._make_room()
                    return False
                self._db, self._watch = begun, FileWatch(self._path)
            if (self._pending or self._ending) and self._watch is not None:
                self._watch.look()
                self._write(self._db)
                self._watch.wrote()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            self._make_room()
            return False
        return True

    def end(self, last: Tick, summary: Summary, ended_by: str) -> bool:
        """Write the last tick and the results. They are on the disk when this returns True."""
        self.add(last.model_copy(update={"is_over": True}))
        self._ending = summary, ended_by
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

    def _begun(self) -> sqlite3.Connection | None:
        """Open the file and put the run on record. Returns None while another process writes the run."""
        db = open_to_write(self._path, _WAIT_S)
        try:
            db.execute("BEGIN IMMEDIATE")
            if self._has_other_writer(db):
                db.close()
                return None
            self._put_on_record(db)
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _write(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            row = db.execute("SELECT host, process FROM runs WHERE key = ?", (self._key,)).fetchone()
            if row != (this_host(), this_process()):
                cause = "was deleted" if row is None else "was taken over by another process"
                raise ParamServerError(f"run {self._beginning.run} {cause} while this process wrote it")
            for number, tick in enumerate(self._pending):
                self._put_tick(db, tick, has_status=number >= self._num_skipped)
            if self._ending is not None:
                self._put_end(db, *self._ending)
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # some errors have rolled back already
                db.execute("ROLLBACK")
            raise
        self._pending, self._num_skipped = [], 0

    def _make_room(self) -> None:
        """Drop the oldest statuses while the file stays locked, but keep their events, evaluations and snapshots."""
        if len(self._pending) > _MOST_PENDING:
            oldest, rest = self._pending[: _MOST_PENDING // 2], self._pending[_MOST_PENDING // 2 :]
            kept = [tick for tick in oldest if tick.events or tick.evaluations or tick.snapshots]
            self._pending, self._num_skipped = [*kept, *rest], len(kept)

    # ---- rows, within a transaction --------------------------------------------------------------

    def _put_on_record(self, db: sqlite3.Connection) -> None:
        """Insert the run, or continue it: delete its rows after the version from which it continues."""
        beginning = self._beginning
        db.execute(
            "INSERT INTO runs (id, project, mode, work, starts, started_at, heard_at, heartbeat_s, host, process) "
            "VALUES (:run, :project, :mode, '', 1, :at, :at, :heartbeat_s, :host, :process) "
            "ON CONFLICT (id) DO UPDATE SET starts = starts + 1, ended_at = NULL, ended_by = '', mode = :mode, "
            "heard_at = :at, heartbeat_s = :heartbeat_s, host = :host, process = :process, version = :version",
            vars(beginning) | {"at": time.time(), "host": this_host(), "process": this_process()},
        )
        self._key, self._stride = db.execute("SELECT key, stride FROM runs WHERE id = ?", (beginning.run,)).fetchone()
        self._put_name(db)
        for table in ("series", "evaluations", "snapshots"):
            db.execute(f"DELETE FROM {table} WHERE run = ? AND version > ?", (self._key, beginning.version))
        self._tick, self._num_kept = self._row(db, "SELECT coalesce(max(tick), 0), count(*) FROM series WHERE run = ?")
        (self._num_events,) = self._row(db, "SELECT coalesce(max(number), 0) FROM events WHERE run = ?")
        db.execute("DELETE FROM worker_series WHERE run = ? AND tick > ?", (self._key, self._tick))
        db.execute("DELETE FROM documents WHERE run = ? AND name = 'summary'", (self._key,))
        newest = "(SELECT metrics FROM evaluations WHERE run = :key ORDER BY version DESC LIMIT 1)"
        db.execute(f"UPDATE runs SET metrics = coalesce({newest}, '{{}}') WHERE key = :key", {"key": self._key})
        for name, body in {"machine": beginning.machine, "code": beginning.code}.items():
            self._put_document(db, name, to_json(body))

    def _has_other_writer(self, db: sqlite3.Connection) -> bool:
        """Whether another live process writes the run. Raises ParamServerError if such a process has ended it."""
        columns = "host, process, heard_at, heartbeat_s, ended_at"
        row = db.execute(f"SELECT {columns} FROM runs WHERE id = ?", (self._beginning.run,)).fetchone()
        if row is None or row[:2] == (this_host(), this_process()):
            return False
        if row[4] is not None and self.obstacle:
            raise ParamServerError(f"run {self._beginning.run} was written by {self.obstacle}", fix=_FIX)
        if row[4] is None and still_writes(*row[:4]):
            self.obstacle = f"process {row[1].split()[0]} on {row[0].split()[0]}"
            return True
        return False

    def _put_name(self, db: sqlite3.Connection) -> None:
        """Write the run's name and note if its command gives them. A name that another run has gets a number."""
        name, note = self._beginning.name, self._beginning.note
        if note:
            db.execute("UPDATE runs SET note = ? WHERE key = ?", (note, self._key))
        taken = {row[0] for row in db.execute("SELECT name FROM runs WHERE key != ?", (self._key,))}
        (known,) = self._row(db, "SELECT name FROM runs WHERE key = ?")
        if name and not (known or "").startswith(name):
            free = next(
                found for number in count(1) if (found := name if number == 1 else f"{name}-{number}") not in taken
            )
            db.execute("UPDATE runs SET name = ? WHERE key = ?", (free, self._key))

    def _put_ran(self, db: sqlite3.Connection) -> None:
        """Write what ran. Until a worker of this start has said it, that of the last start stays."""
        if self.ran == self._written:
            return
        db.execute("UPDATE runs SET work = ? WHERE key = ? AND (work = '' OR ? != '')",
                   (self.ran.work, self._key, self.ran.work))  # fmt: skip
        text = {"name": "config", "body": to_json(self.ran.settings)}
        if self.ran.work or not self._row(db, "SELECT count(*) FROM documents WHERE run = ? AND name = 'config'")[0]:
            self._insert(db, "documents", [text])
        self._written = self.ran

    def _put_tick(self, db: sqlite3.Connection, tick: Tick, has_status: bool) -> None:
        for event in tick.events:
            self._num_events += 1
            row = {"number": self._num_events, "at": event.at, "kind": event.kind, "rank": event.rank}
            self._insert(db, "events", [{**row, "fields": to_json(event.fields)}])
            if (oldest := self._num_events - _MOST_EVENTS) > 0:
                db.execute("DELETE FROM events WHERE run = ? AND number <= ?", (self._key, oldest))
        for point in tick.evaluations:
            row = {**point.model_dump(exclude={"better"}), "metrics": to_json(point.named())}
            self._insert(db, "evaluations", [row])
            db.execute("UPDATE runs SET metrics = ? WHERE key = ?", (to_json(point.metrics), self._key))
        self._insert(db, "snapshots", [snapshot.model_dump() for snapshot in tick.snapshots])
        self._put_ran(db)
        if has_status:
            self._tick += 1
            status = tick.status
            row = {"waiting": status.waiting_reason(), "recorded": to_json(status.recorded), **status.row()}
            now = {"heard_at": tick.at, "model": self.model, "mode": status.mode or self._beginning.mode, **row}
            sets = ", ".join(f'"{name}" = :{name}' for name in now)
            db.execute(f"UPDATE runs SET {sets} WHERE key = :key", {**now, "key": self._key})
            if self._tick % self._stride and not tick.is_over:
                return
            self._insert(db, "series", [{"tick": self._tick, "at": tick.at, **row}])
            workers = [
                {name: getattr(worker, name) for name in _OF_WORKER}
                | {"recorded": to_json(worker.recorded), **worker.row()}
                for worker in status.workers
            ]
            self._insert(db, "worker_series", [{"tick": self._tick, **worker} for worker in workers])
            self._num_kept += 1
            if self._num_kept >= _MOST_TICKS:
                self._stride *= 2
                for table in ("series", "worker_series"):
                    db.execute(f"DELETE FROM {table} WHERE run = ? AND tick % ?", (self._key, self._stride))
                (self._num_kept,) = self._row(db, "SELECT count(*) FROM series WHERE run = ?")
                db.execute("UPDATE runs SET stride = ? WHERE key = ?", (self._stride, self._key))

    def _put_end(self, db: sqlite3.Connection, summary: Summary, ended_by: str) -> None:
        self._put_document(db, "summary", summary.text())
        at = time.time()
        # All workers that took part, because none is left at the end.
        row = [at, at, ended_by, to_json(summary.final), summary.version, len(summary.workers), self._key]
        sets = "ended_at = ?, heard_at = ?, ended_by = ?, metrics = ?, version = ?, num_workers = ?"
        db.execute(f"UPDATE runs SET {sets} WHERE key = ?", row)

    def _put_document(self, db: sqlite3.Connection, name: str, body: str) -> None:
        self._insert(db, "documents", [{"name": name, "body": body}])

    def _insert(self, db: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, which all have the same columns."""
        rows = [{key: _stored(value) for key, value in row.items()} for row in rows]
        for row in rows[:1]:
            names, marks = (", ".join(form % name for name in row) for form in ('"%s"', ":%s"))
            db.executemany(f"INSERT OR REPLACE INTO {table} (run, {names}) VALUES ({self._key}, {marks})", rows)

    def _row(self, db: sqlite3.Connection, question: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] = db.execute(question, (self._key,)).fetchone()
        return found


def _stored(value: Any) -> Any:
    """Return a value that SQLite takes: bytes of a path that are not UTF-8 become escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
