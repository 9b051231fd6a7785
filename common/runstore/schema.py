"""The file of runs: its tables, its version, and how it is opened.

WAL, so that whoever reads holds up nobody who writes; several runs may write into one file on one machine. (WAL needs
memory that processes share: the file cannot lie on a network file system that machines write to at once.)

What may be long (configuration, summary) has a table of its own: a list of runs reads the short columns only.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import OutputError

FILE = "paramserver.db"
VERSION = 1  # of the tables, in PRAGMA user_version

# `tick` counts statuses of a run, of which some are kept. Times `at` are Unix seconds; `elapsed_s` is of training.
# `samples` and `samples_per_s` are -1 where nobody said how many samples a step has: their columns take no NULL.
_TABLES = """
CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    name TEXT UNIQUE,
    project TEXT NOT NULL,
    mode TEXT NOT NULL,
    work TEXT NOT NULL,
    model TEXT NOT NULL DEFAULT '',
    starts INTEGER NOT NULL,
    started_at REAL NOT NULL,
    heard_at REAL NOT NULL,
    ended_at REAL,
    ended_by TEXT NOT NULL DEFAULT '',
    beat_s REAL NOT NULL,
    host TEXT NOT NULL,
    process TEXT NOT NULL,
    step INTEGER NOT NULL DEFAULT 0,
    steps INTEGER NOT NULL DEFAULT 0,
    version INTEGER NOT NULL DEFAULT 0,
    elapsed_s REAL NOT NULL DEFAULT 0,
    num_workers INTEGER NOT NULL DEFAULT 0,
    samples INTEGER NOT NULL DEFAULT 0,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    samples_per_s REAL NOT NULL DEFAULT 0,
    loss REAL,
    waiting TEXT NOT NULL DEFAULT '',
    figures TEXT NOT NULL DEFAULT '{}',
    stride INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX runs_by_start ON runs (started_at);
CREATE TABLE documents (
    run INTEGER NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;
CREATE TABLE series (
    run INTEGER NOT NULL, tick INTEGER NOT NULL, at REAL NOT NULL, elapsed_s REAL NOT NULL,
    step INTEGER NOT NULL, version INTEGER NOT NULL, loss REAL, samples_per_s REAL NOT NULL,
    num_workers INTEGER NOT NULL, samples INTEGER NOT NULL, num_bytes INTEGER NOT NULL, waiting TEXT NOT NULL,
    PRIMARY KEY (run, tick)
) WITHOUT ROWID;
CREATE TABLE worker_series (
    run INTEGER NOT NULL, tick INTEGER NOT NULL, rank INTEGER NOT NULL,
    state TEXT NOT NULL, step INTEGER NOT NULL, lead INTEGER NOT NULL, loss REAL, samples_per_s REAL NOT NULL,
    compute_s REAL NOT NULL, transfer_s REAL NOT NULL, wait_s REAL NOT NULL, samples INTEGER NOT NULL,
    staleness_mean REAL NOT NULL, staleness_max INTEGER NOT NULL,
    bytes_sent INTEGER NOT NULL, bytes_received INTEGER NOT NULL, restarts INTEGER NOT NULL,
    waiting_for TEXT NOT NULL, lane TEXT NOT NULL, codec TEXT NOT NULL,
    PRIMARY KEY (run, tick, rank)
) WITHOUT ROWID;
CREATE TABLE events (
    run INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, rank INTEGER,
    fields TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE TABLE evaluations (
    run INTEGER NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, elapsed_s REAL NOT NULL,
    num_bytes INTEGER, is_best INTEGER NOT NULL, figures TEXT NOT NULL,
    PRIMARY KEY (run, version)
) WITHOUT ROWID;
CREATE TABLE checkpoints (
    run INTEGER NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL, path TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (run, version)
) WITHOUT ROWID;
"""

# All that belong to a run, by its key.
OF_A_RUN = ("documents", "series", "worker_series", "events", "evaluations", "checkpoints")


_MAY_BE_UNKNOWN = ("samples", "samples_per_s")
_UNKNOWN = -1


def stored(name: str, value: Any) -> Any:
    """A value as its column takes it."""
    return _UNKNOWN if value is None and name in _MAY_BE_UNKNOWN else value


def known(name: str, value: Any) -> Any:
    """A value as its column has it; None: not known."""
    return None if value == _UNKNOWN and name in _MAY_BE_UNKNOWN else value


class StoreError(OutputError):
    """The file is not there, is none of ours, or is newer than this program."""


def open_to_write(path: Path, wait_s: float) -> sqlite3.Connection:
    """The file, made with its folder if it is not there. It is waited for `wait_s` where others have locked it.

    Raises StoreError for tables of a newer version, OSError for a folder that cannot be made, sqlite3.Error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=False)
    try:
        _check(connection, path)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; what is deleted can be given back
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if _version_of(connection) == 0:
            _make_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """Never writes into the file. StoreError says why it cannot be read."""
    if not path.is_file():
        raise StoreError(
            f"there is no file of runs {path}",
            fix="runs are kept where their servers start, in output.track_dir: --db FILE names another",
        )
    try:
        connection = connected(path, "mode=ro")
        try:
            _check(connection, path)
        except sqlite3.OperationalError:  # WAL wants a file beside it, which cannot be made here
            connection.close()
            connection = connected(path, "immutable=1")
            _check(connection, path)
        if _version_of(connection) == 0:
            raise StoreError(f"{path} has no runs: it was never finished being made")
    except sqlite3.Error as error:
        raise unreadable(path, error) from None
    return connection


def unreadable(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(
        f"{path} cannot be read: {error}",
        fix="if it is damaged: move it away, a new one is made, and `sqlite3 FILE .recover` saves what can be saved",
    )


def connected(path: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True, timeout=5, check_same_thread=False)


def _version_of(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if (version := _version_of(connection)) > VERSION:
        raise StoreError(
            f"{path} has tables of version {version}, and this program knows them up to {VERSION}",
            fix="a newer paramserver wrote it: pip install -U paramserver, or another --db FILE",
        )
    if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(f"{path} is a database of something else", fix="name another file")


def _make_tables(connection: sqlite3.Connection) -> None:
    """Of two that make them at once one finds them made."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _version_of(connection) == 0:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
