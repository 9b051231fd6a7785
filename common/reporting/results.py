"""The way of a run's results from the process that has them to the launcher: an open file, so of any length.

A log line would not do. Readers of lines limit their length, and anybody's output may look like one.
"""

from __future__ import annotations

import os

from ..wire.json_text import read_json
from .summary import Summary

RESULTS_VARIABLE = "PS_RESULTS_DESCRIPTOR"  # where ps-launch names the open file of a process


def hand_over(summary: Summary) -> bool:
    """Write the results to the launcher's file. Returns False without a launcher. Raises OSError."""
    descriptor = os.environ.pop(RESULTS_VARIABLE, "")
    if not descriptor:
        return False
    with open(int(descriptor), "w", encoding="utf-8") as file:
        file.write(summary.text())
    return True


def taken_over(data: bytes) -> Summary | None:
    """Returns the results that a process left; None if it left none, or a part of them."""
    try:
        return Summary.model_validate(read_json(data, nan=True, big=True))
    except ValueError:  # pydantic's is one
        return None
