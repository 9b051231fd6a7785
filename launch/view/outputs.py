"""What the launcher itself writes: the summaries of several runs in one file."""

from __future__ import annotations

import json

from ...common.errors import OutputError
from ...common.reporting.summary import Summary


def write_run(path: str, summary: Summary) -> None:
    """The summary of a run whose server is elsewhere. Raises OutputError."""
    try:
        summary.write(path)
    except OSError as error:
        raise OutputError(f"--summary {path} cannot be written: {error.strerror}") from None


def write_runs(path: str, summaries: list[Summary]) -> None:
    """The summaries of several runs in one file, {"runs": [...]}. Raises OutputError."""
    text = json.dumps({"runs": [summary.model_dump() for summary in summaries]}, indent=2)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OutputError(f"--summary {path} cannot be written: {error.strerror}") from None
