"""What is changed of runs on record, by their keys. StoreError for a file that is not there or newer, sqlite3.Error."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .schema import OF_A_RUN, open_to_write

_WAIT_S = 5.0


def rename(path: Path, run: int, name: str | None) -> None:
    """The run gets a name, or has none any more. Raises sqlite3.IntegrityError for one that is taken."""
    with _changing(path) as connection:
        connection.execute("UPDATE runs SET name = ? WHERE key = ?", (name, run))


def set_tags(path: Path, run: int, tags: Iterable[str]) -> None:
    """The run gets these tags, and loses those that it had. A tag has no spaces."""
    with _changing(path) as connection:
        connection.execute("UPDATE runs SET tags = ? WHERE key = ?", (" ".join(tags), run))


def remove(path: Path, runs: Iterable[int]) -> None:
    """The runs, and all that belongs to them; what they took of the disk is given back."""
    with _changing(path) as connection:
        for run in runs:
            for table in OF_A_RUN:
                connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
            connection.execute("DELETE FROM runs WHERE key = ?", (run,))
    with closing(open_to_write(path, _WAIT_S)) as connection:
        connection.execute("PRAGMA incremental_vacuum").fetchall()


@contextmanager
def _changing(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction."""
    with closing(open_to_write(path, _WAIT_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
