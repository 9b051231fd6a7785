"""Which exception ended a process, and where: read from its traceback, as Python prints it. Pure.

It is the user's own as a rule, so it is shown once, however many processes raise it and however often.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..plan.process import Child

_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_HEADING = "Traceback (most recent call last):"


class Raised(NamedTuple):
    """An exception, `ValueError: bad batch`, and the innermost `FILE, line N` of its traceback in no library."""

    what: str
    where: str

    @property
    def kind(self) -> tuple[str, str]:
        """The same for the same mistake: messages tell of values."""
        return self.what.partition(":")[0], self.where

    @property
    def is_mistake(self) -> bool:
        """Of the program, whatever the moment: one of Python's own, and not of files, connections or memory."""
        kind = getattr(builtins, self.kind[0], None)
        return isinstance(kind, type) and not issubclass(kind, (OSError, EOFError, MemoryError))

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


class Blame:
    """Reads what each process of a job says."""

    def __init__(self) -> None:
        self._held: dict[Child, list[str]] = {}  # lines of a traceback that is not whole yet
        self._last: dict[Child, Raised] = {}
        self._shown: set[tuple[str, str]] = set()

    @property
    def last(self) -> Mapping[Child, Raised]:
        """The newest of each process that is running, or has just ended."""
        return self._last

    def started(self, child: Child) -> None:
        self._last.pop(child, None)

    def read(self, child: Child, line: str) -> list[str]:
        """The lines to show now: those of a traceback when it is whole, in short when it has been shown before."""
        held = self._held.get(child)
        if held is None and line != _HEADING and not _FRAME.match(line):
            return [line]
        held = self._held.setdefault(child, [])
        held.append(line)
        if line.startswith(" ") or line == _HEADING:
            return []
        del self._held[child]
        frames = [found for line in held if (found := _FRAME.match(line))]
        if not frames:
            return held
        file, number = next((found for found in reversed(frames) if not _LIBRARY.search(found[1])), frames[-1]).groups()
        raised = self._last[child] = Raised(line, f"{file}, line {number}")
        if raised.kind in self._shown:
            return [f"{raised}: the same as above"]
        self._shown.add(raised.kind)
        return held

    def rest(self, child: Child) -> list[str]:
        """Of a process that has ended in the middle of one."""
        return self._held.pop(child, [])
