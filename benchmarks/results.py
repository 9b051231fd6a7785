"""What a benchmark returns, the JSON file it becomes, and the figures that need more than one line."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import OutputError
from .machine import machine, versions

if TYPE_CHECKING:
    from rich.console import RenderableType

FIGURE_DIGITS = 4  # significant ones, in the JSON file


@dataclass
class Report:
    """`results` holds numbers under names with units; `table` is the same for people."""

    what: str
    config: dict[str, Any]
    results: dict[str, Any]
    table: RenderableType

    def write(self, path: str) -> None:
        """As JSON; OutputError when the path cannot be written."""
        content = {
            "what": self.what,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "config": self.config,
            "results": _rounded(self.results),
        }
        try:
            Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}", fix="choose a path you may write to") from None


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{FIGURE_DIGITS}g}")
    return value
