"""The report of a benchmark, its JSON file, and metrics of more than one line."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import OutputError
from .machine import machine, name, versions

if TYPE_CHECKING:
    from rich.console import RenderableType

RESULTS = Path(__file__).parents[1] / "results"
SIGNIFICANT_DIGITS = 4  # in the JSON file


@dataclass
class Report:
    """`results` holds numbers under names with units; `table` is the same for people."""

    measurement: str
    config: dict[str, Any]
    results: dict[str, Any]
    table: RenderableType

    @property
    def is_sweep(self) -> bool:
        return bool(self.config.get("sweep"))

    @property
    def has_picture(self) -> bool:
        return self.is_sweep or self.measurement == "race"

    @property
    def kept_name(self) -> str:
        return f"{self.measurement}-sweep" if self.is_sweep else self.measurement

    @property
    def title(self) -> str:
        """Returns date and machine in one line."""
        found = machine()
        return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {name()}, {found['model']}"

    def write(self, path: str) -> None:
        """Write the report as JSON. Raises OutputError."""
        content = {
            "what": self.measurement,
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


def kept_path(measurement: str, suffix: str, folder: Path = RESULTS) -> Path:
    """Where a result is kept: date, what, cores and clock, and a number from the second of a day on."""
    stem = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{measurement}-{name()}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for name in names if not (path := folder / f"{name}{suffix}").exists())


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return value
