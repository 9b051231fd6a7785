"""Whether the file of runs is still the one that a writer has open, and whole: SQLite itself would not say so.

A file that is deleted or replaced is written on, and nobody sees it any more. Of one that is cut or overwritten SQLite
notices only the parts that it happens to read.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from ..errors import ParamServerError
from .schema import connected

_MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 32  # of which bytes 16 and 17 are the size of a page, the last four the number of pages
_FIX = "ps-runs of what is there now; the next run makes a new file if there is none"


class FileWatch:
    """Of a file that has just been opened. `look` is asked before, `wrote` told after each transaction.

    It has one descriptor of its own, which is closed after SQLite's: when a process closes any descriptor of a file, it
    loses all locks that it has on it (POSIX).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        self._identity = found.st_dev, found.st_ino
        self._mtime_ns = -1  # not known: tables have been made
        self._is_short = False

    def wrote(self) -> None:
        with suppress(OSError):
            self._mtime_ns = self._path.stat().st_mtime_ns

    def close(self) -> None:
        os.close(self._descriptor)

    def look(self) -> None:
        """Raises ParamServerError, which says what has become of the file."""
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
        # Another run that writes back its log begins with the head: twice in a row it is no moment in between.
        was_short, self._is_short = self._is_short, found.st_size < num_bytes
        if was_short and self._is_short:
            return "was cut"
        is_changed = self._mtime_ns not in (-1, found.st_mtime_ns)
        self._mtime_ns = found.st_mtime_ns
        return self._damage() if is_changed and not self._is_short else ""

    def _damage(self) -> str:
        """Somebody else has written into it: another run, or what does not know what it writes."""
        try:
            with closing(connected(self._path, "mode=ro")) as fresh:
                (verdict,) = fresh.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.OperationalError:
            return ""  # locked, say
        except sqlite3.DatabaseError as error:
            return f"was damaged ({error})"
        return "" if verdict == "ok" else f"was damaged ({str(verdict).splitlines()[-1]})"
