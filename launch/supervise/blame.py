"""Finds the exception that ended a process, and its place, in the traceback that Python prints. Pure.

The exception is usually in the user's code. It is shown once, even if many processes raise it many times.
"""

from __future__ import annotations

import builtins
import re
from typing import NamedTuple

from ..plan.process import Child

_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_HEADING = "Traceback (most recent call last):"
# What torch.distributed and scripts for torchrun read from the environment.
_OF_A_PROCESS_GROUP = re.compile(r"\b(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")


class Raised(NamedTuple):
    """An exception, `ValueError: bad batch`, and the innermost `FILE, line N` of its traceback outside of libraries."""

    text: str
    where: str

    @property
    def kind(self) -> tuple[str, str]:
        """Equal for the same mistake; messages differ in values."""
        return self.text.partition(":")[0], self.where

    @property
    def is_mistake(self) -> bool:
        """Whether it is a mistake in the program: an exception of Python, but not of files, connections or memory."""
        kind = getattr(builtins, self.kind[0], None)
        return isinstance(kind, type) and not issubclass(kind, (OSError, EOFError, MemoryError))

    @property
    def variable(self) -> str:
        """The variable of a process group that the script did not find; "" for other exceptions."""
        found = _OF_A_PROCESS_GROUP.search(self.text)
        return found[0] if found and self.kind[0] in ("KeyError", "ValueError", "TypeError") else ""

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


class Blame:
    """Reads the lines of each process of a job."""

    def __init__(self) -> None:
        self._pending: dict[Child, list[str]] = {}  # lines of an incomplete traceback
        self.last: dict[Child, Raised] = {}  # of each process: what it raised, and did not go on from
        self._reporting: set[Child] = set()  # they have connected, and so say when nothing catches an exception
        self._ended: set[Child] = set()  # by an exception that nothing caught
        self._shown: set[tuple[str, str]] = set()

    def started(self, child: Child) -> None:
        self.last.pop(child, None)
        self._ended.discard(child)
        self._reporting.discard(child)

    def connected(self, child: Child) -> None:
        """The process writes events: it went on from what it raised before."""
        if child not in self._reporting:
            self._reporting.add(child)
            self.last.pop(child, None)

    def uncaught(self, child: Child) -> None:
        """The process has said that its last traceback ends it. Lines after that are of its exit handlers."""
        self._ended.add(child)
        self._reporting.add(child)

    def read(self, child: Child, line: str) -> list[str]:
        """Returns the lines to show now: a traceback once it is complete, or one line if it was shown before."""
        lines = self._pending.get(child)
        if lines is None and line != _HEADING and not _FRAME.match(line):
            if line[:1].strip() and child in self._reporting - self._ended:
                self.last.pop(child, None)  # it went on: it has handled that exception
            return [line]
        lines = self._pending.setdefault(child, [])
        lines.append(line)
        if line.startswith(" ") or line == _HEADING:
            return []
        del self._pending[child]
        frames = [found for line in lines if (found := _FRAME.match(line))]
        if not frames:
            return lines
        file, number = next((found for found in reversed(frames) if not _LIBRARY.search(found[1])), frames[-1]).groups()
        raised = self.last[child] = Raised(line, f"{file}, line {number}")
        if raised.kind in self._shown:
            return [f"{raised}: the same as above"]
        self._shown.add(raised.kind)
        return lines

    def rest(self, child: Child) -> list[str]:
        """Returns the lines of a traceback in whose middle the process ended."""
        return self._pending.pop(child, [])
