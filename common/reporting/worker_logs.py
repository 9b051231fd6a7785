"""The files in which ps-launch keeps the last lines of each worker, and where the dashboard finds them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..security import WEB_LOGS_VARIABLE

MAX_LINES = 200
_MAX_BYTES = 256 << 10  # read from the end of a file
_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def log_file(folder: Path, rank: int) -> Path:
    """Returns the file of a worker."""
    return folder / f"worker-{rank}.log"


def last_lines(rank: int) -> list[str] | None:
    """Returns the last lines of a worker, without colors; None if ps-launch keeps no lines for this process."""
    if not (folder := os.environ.get(WEB_LOGS_VARIABLE)):
        return None
    try:
        with log_file(Path(folder), rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return [] if Path(folder).is_dir() else None
    return [_STYLE.sub("", line) for line in text.splitlines()[-MAX_LINES:]]
