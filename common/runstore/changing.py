"""Renames, tags and deletes runs of the run store by their keys.

Every function raises StoreError if the file is missing or has a newer version, and sqlite3.Error."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .schema import OF_A_RUN, open_to_write

_WAIT_S = 5.0


def rename(path: Path, run: int, name: str | None) -> None:
    """Name the run; None removes its name. Raises sqlite3.IntegrityError if another run has the name."""
    with _changing(path) as connection:
        connection.execute("UPDATE runs SET name = ? WHERE key = ?", (name, run))


def set_tags(path: Path, run: int, tags: Iterable[str]) -> None:
    """Replace the tags of the run. A tag has no spaces."""
    with _changing(path) as connection:
        connection.execute("UPDATE runs SET tags = ? WHERE key = ?", (" ".join(tags), run))


def remove(path: Path, runs: Iterable[int]) -> None:
    """Delete the runs with all their rows, and return the free pages to the disk."""
    with _changing(path) as connection:
        for run in runs:
            for table in OF_A_RUN:
                connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
            connection.execute("DELETE FROM runs WHERE key = ?", (run,))
    with closing(open_to_write(path, _WAIT_S)) as connection:
        connection.execute("PRAGMA incremental_vacuum").fetchall()


@contextmanager
def _changing(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file and run the block as one transaction."""
    with closing(open_to_write(path, _WAIT_S)) as connection, connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
