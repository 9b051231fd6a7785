"""Shows the progress of a long command and the remaining time: a bar on a terminal, lines elsewhere.

It writes to standard error, so that standard output has only the results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .words import duration

_LEAST_PART, _LEAST_S = 0.05, 1.0  # earlier the remaining time is unknown


class Steps:
    """A context manager that displays progress; `at` updates it."""

    def __init__(self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._began = clock()
        self._activity = ""
        self._bar: Progress | None = None
        if self._stream.isatty():
            console = Console(file=self._stream, emoji=False)
            activity, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}")
            self._bar = Progress(activity, BarColumn(bar_width=24), left, console=console, transient=True)
            self._task = self._bar.add_task("", total=1.0, left="")

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, part: float, activity: str) -> None:
        """Show that `part` (0..1) is done and `activity` follows; without a terminal, print each new activity."""
        left = self.left(part)
        if self._bar is not None:
            self._bar.update(self._task, completed=part, description=activity, left=left)
        elif activity != self._activity:
            print(activity + (f", {left}" if left else ""), file=self._stream, flush=True)
        self._activity = activity

    def left(self, part: float) -> str:
        """Returns the remaining time in words; empty if it is not known yet."""
        passed_s = self._clock() - self._began
        if part < _LEAST_PART or passed_s < _LEAST_S:
            return ""
        return f"about {duration(passed_s * (1 - part) / part)} to go"
