"""Files that a run will write at its end, tried before it starts: hours of training should not end in exit 14."""

from __future__ import annotations

import json
import os

from ..common.errors import OutputError
from ..common.summary import Summary


def check_writable(path: str, what: str) -> None:
    """Raise OutputError unless `path` can be written now. An existing file keeps its content."""
    existed = os.path.lexists(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        folder = os.path.dirname(path) or "."
        fix = f"mkdir -p {folder}" if not os.path.exists(folder) else f"choose another path for {what}"
        raise OutputError(f"{what} {path} cannot be written: {error.strerror}", fix=fix) from None
    os.close(descriptor)
    if not existed:
        os.unlink(path)


def write_runs(path: str, summaries: list[Summary]) -> None:
    """The summaries of several runs in one file, {"runs": [...]}. Raises OutputError."""
    text = json.dumps({"runs": [summary.model_dump() for summary in summaries]}, indent=2)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OutputError(f"--summary {path} cannot be written: {error.strerror}") from None
