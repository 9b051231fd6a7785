"""Records a run of this process in the run store while it is in progress. No error of the file reaches the run.

The record keeps ticks in memory until `flush`, which is one transaction. While other processes lock the file, ticks
stay in memory. Above a limit the record drops the oldest statuses. The series has a limited number of rows: when it is
full, the record deletes every second row and stores every second status from then on. A run of a day has a row every
two minutes.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.schema import Config
from ..errors import ParamServerError
from ..reporting.log import get_logger
from ..reporting.summary import Summary, Tick
from ..version import PROGRAM_VERSION
from ..wire.json_text import read_json, to_json
from .process import machine, still_writes, this_host, this_process
from .schema import FILE, connected, open_to_write

if TYPE_CHECKING:
    from ..tensors.optimizers import OptimizerSpec


log = get_logger()

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MOST_TICKS = 1024  # of a run; half as many after thinning
_MOST_EVENTS = 10_000
_MOST_PENDING = 2_000
_WAIT_S = 2.0  # for a locked file; the next flush tries again
_LAST_WAIT_S = 5.0  # at the end
_FIX = "give each run its own --checkpoint-dir, and each machine its own output.track_dir"

_OF_WORKER = ("rank", "state", "waiting_for", "transport", "transport_reason", "codec")


class Record:
    """Writes one run to the run store that the configuration names. One thread uses it, and may block on the disk.

    `at_version`: the version from which the run continues. If the file cannot be created or written, the record logs
    one line and stops writing. The line is a warning unless the file is the default one. If other processes lock the
    file, the next `flush` tries again.
    """

    def __init__(self, config: Config, *, run: str, mode: str, at_version: int = 0) -> None:
        self._config, self._run, self._mode, self._at_version = config, run, mode, at_version
        self._path = Path(config.output.track_dir) / FILE
        self.is_off = self._has_waited = False
        self._file: tuple[sqlite3.Connection, FileWatch] | None = None  # once the run is in the file
        self._key = 0
        self._tick = 0  # of the newest status
        self._stride = 1
        self._num_events = 0
        self._pending: list[tuple[Tick, bool]] = []  # ticks, and whether the status of each is kept
        self._ending: tuple[Summary, str] | None = None  # results, and who stopped the run
        self.model = ""  # fingerprint of the model that the run trains
        self._obstacle = ""  # another process that writes the run
        self.ran = Ran()  # written with the next tick
        self._written = Ran()

    def add(self, tick: Tick) -> None:
        """Keep a tick for the next `flush`."""
        if not self.is_off:
            self._pending.append((tick, True))

    def end(self, last: Tick, summary: Summary, ended_by: str) -> None:
        """Write the last tick and the results of the run to the disk, and close the file."""
        self.add(last.model_copy(update={"is_over": True}))
        self._ending = summary, ended_by
        self.flush()
        self.close()

    def close(self) -> None:
        if self._file is not None:
            db, watch = self._file
            self._file = None
            with suppress(sqlite3.Error):
                db.close()
            watch.close()

    # ---- to the file -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all pending ticks, or log why they are not written."""
        if self.is_off:
            return
        try:
            is_written = self.write()
        except (sqlite3.Error, OSError, ParamServerError) as error:
            self.is_off = True
            is_wanted = not self._config.output.model_fields_set.isdisjoint({"store", "track_dir"})
            is_default = isinstance(error, OSError) and error.errno in _NOT_ALLOWED and not is_wanted
            tell = log.info if is_default else log.warning
            tell("store_off", path=str(self._path), reason=str(error), meaning="the run goes on, and is not on record")
            return
        is_last = self._ending is not None
        if not is_written and (is_last or not self._has_waited):
            self._has_waited = True
            lost = "what was not written is lost" if is_last else "it is tried again with each status"
            why = f"{self._obstacle} writes this run" if self._obstacle else "another process has locked it"
            log.warning("store_locked", path=str(self._path), meaning=f"{why}; {lost}")

    def write(self) -> bool:
        """Write all pending ticks in one transaction. Returns False while another process locks the file or the run.

        Raises sqlite3.Error, OSError or ParamServerError. After an error, close the record.
        """
        try:
            if self._file is None:
                self._begin()
            if self._file is None:
                self._make_room()
                return False
            db, watch = self._file
            if self._ending is not None:
                db.execute(f"PRAGMA busy_timeout = {int(1000 * _LAST_WAIT_S)}")
                db.execute("PRAGMA synchronous = FULL")
            if self._pending or self._ending:
                watch.look()
                self._write(db)
                watch.wrote()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            self._make_room()
            return False
        return True

    def _begin(self) -> None:
        """Open the file and put the run on record, unless another process writes the run."""
        db = open_to_write(self._path, _WAIT_S)
        try:
            with db:
                db.execute("BEGIN IMMEDIATE")
                if is_free := not self._has_other_writer(db):
                    self._put_on_record(db)
            if is_free:
                self._file = db, FileWatch(self._path)
        finally:
            if self._file is None:
                db.close()

    def _write(self, db: sqlite3.Connection) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            row = db.execute("SELECT host, process FROM runs WHERE key = ?", (self._key,)).fetchone()
            if row != (this_host(), this_process()):
                cause = "was deleted" if row is None else "was taken over by another process"
                raise ParamServerError(f"run {self._run} {cause} while this process wrote it")
            for tick, has_status in self._pending:
                self._put_tick(db, tick, has_status)
            if self._ending is not None:
                summary, ended_by = self._ending
                self._insert(db, "documents", [{"name": "summary", "body": summary.text()}])
                at = time.time()
                # All workers that took part, because none is left at the end.
                row = [at, at, ended_by, to_json(summary.final), summary.version, len(summary.workers), self._key]
                sets = "ended_at = ?, heard_at = ?, ended_by = ?, metrics = ?, version = ?, num_workers = ?"
                db.execute(f"UPDATE runs SET {sets} WHERE key = ?", row)
        self._pending = []

    def _make_room(self) -> None:
        """Drop the oldest statuses while the file stays locked, but keep their events, evaluations and snapshots."""
        if len(self._pending) > _MOST_PENDING:
            oldest, rest = self._pending[: _MOST_PENDING // 2], self._pending[_MOST_PENDING // 2 :]
            kept = [(tick, False) for tick, _ in oldest if tick.events or tick.evaluations or tick.snapshots]
            self._pending = [*kept, *rest]

    # ---- rows, within a transaction --------------------------------------------------------------

    def _put_on_record(self, db: sqlite3.Connection) -> None:
        """Insert the run, or continue it: delete its rows after the version from which it continues."""
        config = self._config
        about = {
            "run": self._run, "mode": self._mode, "project": config.output.project, "at": time.time(),
            "heartbeat_s": config.server.status_interval_s, "host": this_host(), "process": this_process(),
            "version": self._at_version,
        }  # fmt: skip
        db.execute(
            "INSERT INTO runs (id, project, mode, work, starts, started_at, heard_at, heartbeat_s, host, process) "
            "VALUES (:run, :project, :mode, '', 1, :at, :at, :heartbeat_s, :host, :process) "
            "ON CONFLICT (id) DO UPDATE SET starts = starts + 1, ended_at = NULL, ended_by = '', mode = :mode, "
            "heard_at = :at, heartbeat_s = :heartbeat_s, host = :host, process = :process, version = :version",
            about,
        )
        self._key, self._stride = db.execute("SELECT key, stride FROM runs WHERE id = ?", (self._run,)).fetchone()
        self._put_name(db)
        for table in ("series", "evaluations", "snapshots"):
            db.execute(f"DELETE FROM {table} WHERE run = ? AND version > ?", (self._key, self._at_version))
        (self._tick,) = self._row(db, "SELECT coalesce(max(tick), 0) FROM series WHERE run = ?")
        (self._num_events,) = self._row(db, "SELECT coalesce(max(number), 0) FROM events WHERE run = ?")
        db.execute("DELETE FROM worker_series WHERE run = ? AND tick > ?", (self._key, self._tick))
        db.execute("DELETE FROM documents WHERE run = ? AND name = 'summary'", (self._key,))
        newest = "(SELECT metrics FROM evaluations WHERE run = :key ORDER BY version DESC LIMIT 1)"
        db.execute(f"UPDATE runs SET metrics = coalesce({newest}, '{{}}') WHERE key = :key", {"key": self._key})
        documents = {"machine": machine(), "code": {"paramserver": PROGRAM_VERSION}}
        self._insert(db, "documents", [{"name": name, "body": to_json(body)} for name, body in documents.items()])

    def _has_other_writer(self, db: sqlite3.Connection) -> bool:
        """Whether another live process writes the run. Raises ParamServerError if such a process has ended it."""
        columns = "host, process, heard_at, heartbeat_s, ended_at"
        row = db.execute(f"SELECT {columns} FROM runs WHERE id = ?", (self._run,)).fetchone()
        if row is None or row[:2] == (this_host(), this_process()):
            return False
        host, process, heard_at, heartbeat_s, ended_at = row
        if ended_at is not None and self._obstacle:
            raise ParamServerError(f"run {self._run} was written by {self._obstacle}", fix=_FIX)
        if ended_at is not None or not still_writes(host, process, heard_at, heartbeat_s):
            return False
        self._obstacle = f"process {process.split()[0]} on {host.split()[0]}"
        return True

    def _put_name(self, db: sqlite3.Connection) -> None:
        """Write the run's name and note if its command gives them. A name that another run has gets a number."""
        name, note = self._config.output.name, self._config.output.note
        if note:
            db.execute("UPDATE runs SET note = ? WHERE key = ?", (note, self._key))
        taken = {row[0] for row in db.execute("SELECT name FROM runs WHERE key != ?", (self._key,))}
        (known,) = self._row(db, "SELECT name FROM runs WHERE key = ?")
        if name and not (known or "").startswith(name):
            numbered = chain([name], (f"{name}-{number}" for number in count(2)))
            free = next(found for found in numbered if found not in taken)
            db.execute("UPDATE runs SET name = ? WHERE key = ?", (free, self._key))

    def _put_ran(self, db: sqlite3.Connection) -> None:
        """Write what ran. Until a worker of this start has said it, that of the last start stays."""
        if self.ran == self._written:
            return
        db.execute("UPDATE runs SET work = ? WHERE key = ? AND (work = '' OR ? != '')",
                   (self.ran.work, self._key, self.ran.work))  # fmt: skip
        if self.ran.work or not self._row(db, "SELECT count(*) FROM documents WHERE run = ? AND name = 'config'")[0]:
            self._insert(db, "documents", [{"name": "config", "body": to_json(self.ran.settings)}])
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
            now = {"heard_at": tick.at, "model": self.model, "mode": status.mode or self._mode, **row}
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
            if self._row(db, "SELECT count(*) FROM series WHERE run = ?")[0] >= _MOST_TICKS:
                self._stride *= 2
                for table in ("series", "worker_series"):
                    db.execute(f"DELETE FROM {table} WHERE run = ? AND tick % ?", (self._key, self._stride))
                db.execute("UPDATE runs SET stride = ? WHERE key = ?", (self._stride, self._key))

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


# ---- what ran ------------------------------------------------------------------------------------
# What ran: the one record of a run's settings, for the run store, the dashboard, trackers and reports.
#
# The server's configuration describes the server and its mode. A worker describes the rest with its first
# contribution, in the sections of `OF_WORKERS`: the script with its arguments and commit or the task, the batch size,
# and what the script gave to `session.config`. Its model has the optimizer. Before that all of it is unknown, never a
# default of the configuration.


Settings = dict[str, dict[str, Any]]  # values by section and name

# Sections of the server's configuration that do not say what workers run, or that are no settings of the run.
_LEFT_OUT = {"security", "task", "optimizer", "train", "loader", "worker", "slowdown", "launch", "serve", "log"}
_LONGEST = 100  # characters of a name that a worker gives
OF_WORKERS = ("script", "task", "run", "launch", "worker", "loader", "slowdown", "config")


@dataclass(frozen=True)
class Ran:
    """What ran, as far as it is known. `work`: the script or the task as a phrase, empty: unknown."""

    work: str = ""
    settings: Settings = field(default_factory=dict)


def what_ran(
    config: Config, mode: str, policy: Mapping[str, Any], optimizer: OptimizerSpec | None, work: Settings
) -> Ran:
    """Returns what ran, with the settings by section.

    `policy`: the options of the mode, with values for its defaults. `optimizer`: None if it is unknown. Where its
    groups differ, a hyperparameter is a list of values. `work`: what workers say, empty before their first word.
    """
    found: Settings = config.model_dump(mode="json", exclude=_LEFT_OUT)
    found["policy"] = {name: getattr(config.policy, name) for name in type(config.policy).model_fields} | dict(policy)
    found["run"] |= {"mode": mode, "batch_size": None}
    del found["run"]["other_modes"]
    found["launch"] = {"serve": config.launch.serve}
    if "task" in work:
        found["train"] = config.train.model_dump(mode="json")
    if optimizer is not None:
        groups = [group.hyperparameters for group in optimizer.groups]
        values = {key: [group.get(key) for group in groups] for key in chain(*groups)}
        same = {key: of[0] if of.count(of[0]) == len(of) else of for key, of in values.items()}
        found["optimizer"] = {"name": optimizer.name} | same
    for section, values in work.items():
        found[section] = {**found.get(section, {}), **values}
    path, task = work.get("script", {}).get("path"), str(work.get("task", {}).get("name", ""))
    return Ran(f"script {Path(str(path)).name[:_LONGEST]}" if path else task[:_LONGEST], found)


def read_work(text: str) -> Settings:
    """Returns what a worker says, without sections that are not its own. Malformed text says nothing."""
    try:
        found = read_json(text) if text else {}
    except ValueError:
        return {}
    sections = found.items() if isinstance(found, dict) else ()
    return {name: values for name, values in sections if name in OF_WORKERS and isinstance(values, dict)}


# ---- watching ------------------------------------------------------------------------------------
# Checks that the run store's file was not deleted, replaced or damaged while a writer has it open.
#
# SQLite does not detect this: it keeps writing to a deleted or replaced file, where no reader sees the rows. It
# notices that a file was truncated or overwritten only in the pages that it reads.


_MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 32  # bytes 16 and 17: size of a page; the last four: number of pages
_FIX = "check the file with ps-runs list; if there is none, the next run creates it"


class FileWatch:
    """Watches a file that was just opened. Call `look` before and `wrote` after each transaction.

    The watch has its own descriptor. Close it after SQLite's descriptors: when a process closes any descriptor of a
    file, it loses all its locks on that file (POSIX).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        self._identity = found.st_dev, found.st_ino
        self._mtime_ns = -1  # unknown, because the tables were just created
        self._is_short = False

    def wrote(self) -> None:
        with suppress(OSError):
            self._mtime_ns = self._path.stat().st_mtime_ns

    def close(self) -> None:
        os.close(self._descriptor)

    def look(self) -> None:
        """Check the file. Raises ParamServerError that says what happened to it."""
        if wrong := self._wrong():
            raise ParamServerError(f"{self._path} {wrong} while this run wrote into it", fix=_FIX)

    def _wrong(self) -> str:
        try:
            found = self._path.stat()
        except OSError:
            return "was deleted"
        if (found.st_dev, found.st_ino) != self._identity:
            return "was replaced by another file"
        if not found.st_size:
            return "was emptied"
        head = os.pread(self._descriptor, _HEAD_BYTES, 0)
        if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
            return "was damaged"
        page_bytes = int.from_bytes(head[16:18], "big")
        num_bytes = int.from_bytes(head[28:32], "big") * (65536 if page_bytes == 1 else page_bytes)
        # A checkpoint of another run's WAL writes the header first, so only two short readings in a row are an error.
        was_short, self._is_short = self._is_short, found.st_size < num_bytes
        if was_short and self._is_short:
            return "was truncated"
        is_changed = self._mtime_ns not in (-1, found.st_mtime_ns)
        self._mtime_ns = found.st_mtime_ns
        return self._damage() if is_changed and not self._is_short else ""

    def _damage(self) -> str:
        """Check a file that another process changed: another run, or a program that damages it. Returns the damage."""
        try:
            with closing(connected(self._path, "mode=ro")) as fresh:
                (verdict,) = fresh.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError:
            return ""  # for example: locked
        except sqlite3.DatabaseError as error:
            return f"was damaged ({error})"
        return "" if verdict == "ok" else f"was damaged ({str(verdict).splitlines()[-1]})"
