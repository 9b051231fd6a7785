"""Keeps the last lines of each worker in files, for a dashboard on the same host."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from ...common.reporting.worker_logs import MAX_LINES, log_file
from ...common.security import WEB_LOGS_VARIABLE
from ..plan.process import Child
from .events import Event
from .text import event_text


class WorkerLogs:
    """A file for each worker, in the folder that the environment names; without one, nothing."""

    def __init__(self) -> None:
        folder = os.environ.get(WEB_LOGS_VARIABLE)
        self._folder = Path(folder) if folder else None
        self._lines: dict[int, deque[str]] = {}
        self._num_written: dict[int, int] = {}  # lines in the file
        if self._folder is not None:
            for file in self._folder.glob("*"):  # of the run before
                file.unlink(missing_ok=True)

    def add(self, child: Child, line: str, event: Event | None) -> None:
        """Append a line. A file that is twice as long as what is shown is written anew."""
        if self._folder is None or child.role != "worker":
            return
        text = line if event is None else event_text(event)
        lines = self._lines.setdefault(child.rank, deque(maxlen=MAX_LINES))
        lines.append(text)
        num = self._num_written.get(child.rank, 2 * MAX_LINES) + 1
        is_anew = num > 2 * MAX_LINES
        with suppress(OSError), log_file(self._folder, child.rank).open("w" if is_anew else "a") as file:
            file.write("".join(f"{line}\n" for line in (lines if is_anew else [text])))
            self._num_written[child.rank] = len(lines) if is_anew else num
