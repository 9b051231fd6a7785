"""The run store's file: its tables, its version, and how it is opened.

The file uses SQLite's WAL, so that readers do not block writers. Several runs on one machine may write to one file.
WAL needs memory shared between processes, so several machines cannot write to one file on a network file system.

Long documents (configuration, summary) have a table of their own, so that a list of runs reads only short columns.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

from ..errors import OutputError
from ..reporting.summary import Measured, Status, WorkerStatus
from ..version import STORE_VERSION

FILE = "paramserver.db"
VERSION = STORE_VERSION  # in PRAGMA user_version

# AUTOINCREMENT: the key of a deleted run never goes to another, so its late rows belong to none.
# `tick` numbers all statuses of a run; some are stored. `at` is in Unix seconds; `elapsed_s` is training time.
# `runs`, `series` and `worker_series` also have a column for each metric of `reporting/metrics.py`; NULL: unknown.
_TABLES = """
CREATE TABLE runs (
    key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT UNIQUE, note TEXT NOT NULL DEFAULT '',
    tags TEXT NOT NULL DEFAULT '', project TEXT NOT NULL, mode TEXT NOT NULL, work TEXT NOT NULL,
    model TEXT NOT NULL DEFAULT '', starts INTEGER NOT NULL, started_at REAL NOT NULL, heard_at REAL NOT NULL,
    ended_at REAL, ended_by TEXT NOT NULL DEFAULT '', heartbeat_s REAL NOT NULL, host TEXT NOT NULL,
    process TEXT NOT NULL, waiting TEXT NOT NULL DEFAULT '', metrics TEXT NOT NULL DEFAULT '{}',
    stride INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX runs_by_start ON runs (started_at);
CREATE TABLE documents (
    run INTEGER NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;
CREATE TABLE series (
    run INTEGER NOT NULL, tick INTEGER NOT NULL, at REAL NOT NULL, waiting TEXT NOT NULL,
    PRIMARY KEY (run, tick)
) WITHOUT ROWID;
CREATE TABLE worker_series (
    run INTEGER NOT NULL, tick INTEGER NOT NULL, rank INTEGER NOT NULL,
    state TEXT NOT NULL, waiting_for TEXT NOT NULL, transport TEXT NOT NULL, transport_reason TEXT NOT NULL,
    codec TEXT NOT NULL,
    PRIMARY KEY (run, tick, rank)
) WITHOUT ROWID;
CREATE TABLE events (
    run INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, rank INTEGER,
    fields TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE TABLE evaluations (
    run INTEGER NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, elapsed_s REAL NOT NULL,
    num_bytes INTEGER, samples INTEGER, is_best INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (run, version)
) WITHOUT ROWID;
CREATE TABLE snapshots (
    run INTEGER NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL, path TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (run, version)
) WITHOUT ROWID;
"""

# Tables whose rows belong to a run, by its key.
OF_A_RUN = ("documents", "series", "worker_series", "events", "evaluations", "snapshots")


class StoreError(OutputError):
    """The file is missing, is not a run store, or has a newer version than this program."""


def open_to_write(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open the file for writing; create it and its folder if missing. Wait up to `wait_s` seconds for its lock.

    Raises StoreError for tables of a newer version, OSError if the folder cannot be created, and sqlite3.Error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=False)
    try:
        _check(connection, path)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for a new file: lets it shrink after a deletion
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if _version_of(connection) == 0 or _lacking(connection):
            with connection:
                # If two processes try at once, the second finds all tables and columns created.
                connection.execute("BEGIN IMMEDIATE")
                if _version_of(connection) == 0:
                    for statement in _TABLES.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {VERSION}")
                for table, name, default in _lacking(connection):
                    value = "NULL" if default is None else default
                    connection.execute(f'ALTER TABLE {table} ADD COLUMN "{name}" DEFAULT {value}')
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open the file for reading only. Raises StoreError with the reason if it cannot be read."""
    if not path.is_file():
        fix = "name the file (ps-runs --db FILE) or its folder (--set output.track_dir=DIR), where the server wrote it"
        raise StoreError(f"there is no run store {path}", fix=fix)
    try:
        connection = connected(path, "mode=ro")
        try:
            _check(connection, path)
        except sqlite3.OperationalError:  # WAL needs a second file, which cannot be created in this folder
            connection.close()
            connection = connected(path, "immutable=1")
            _check(connection, path)
        if _version_of(connection) == 0:
            fix = "delete it if no run is just starting"
            raise StoreError(f"{path} is empty: its creation was interrupted", fix=fix)
    except sqlite3.Error as error:
        raise unreadable(path, error) from None
    return connection


def unreadable(path: Path, error: sqlite3.Error) -> StoreError:
    fix = "if it is damaged, move it away: the next run creates a new file; `sqlite3 FILE .recover` reads the old"
    return StoreError(f"{path} cannot be read: {error}", fix=fix)


def connected(path: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True, timeout=5, check_same_thread=False)


def _version_of(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _check(connection: sqlite3.Connection, path: Path) -> None:
    version = _version_of(connection)
    if version not in (0, VERSION):
        fix = "a newer paramserver wrote it: pip install -U paramserver, or another --db FILE"
        if version < VERSION:
            fix = "an older paramserver wrote it: move it away, and the next run creates a new one"
            fix += "; or another --db FILE"
        raise StoreError(f"{path} has tables of version {version}, but this program reads version {VERSION}", fix=fix)
    if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(f"{path} is an SQLite database of another program", fix="name another file with --db FILE")


def _lacking(connection: sqlite3.Connection) -> list[tuple[str, str, object]]:
    """Returns the columns that an older file lacks: table, name, default."""
    found: list[tuple[str, str, object]] = []
    for table in ("runs", "series", "worker_series"):
        known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        record: type[Measured] = WorkerStatus if table == "worker_series" else Status
        columns: dict[str, object] = {metric.name: metric.default for metric in record.declared_metrics()}
        columns["recorded"] = "'{}'"  # JSON: metrics that scripts record
        found += [(table, name, default) for name, default in columns.items() if name not in known]
    return found
