"""Checks that the run store's file was not deleted, replaced or damaged while a writer has it open.

SQLite does not detect this: it keeps writing to a deleted or replaced file, where no reader sees the rows. It notices
that a file was truncated or overwritten only in the pages that it reads.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from ..errors import ParamServerError
from .schema import connected

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
