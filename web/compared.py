"""Data with which the browser compares runs: settings that differ, and the curves of each run."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel

from ..common.reporting.curve import is_up
from ..common.reporting.metrics import Metric, Value
from ..common.reporting.view import EvaluatedPoint, View
from ..common.runstore.reading import StoredRun, relevant_settings
from ..common.wire.json_text import finite
from .stored import Store

MAX_TAGS = 10
MAX_TAG_CHARACTERS = 40

# Whether higher values of a run's metric are better. The metrics that are absent have no better direction.
IS_UP = {
    "loss": False, "elapsed_s": False, "samples_per_s": True, "wait_share": False, "num_bytes": False,
    "staleness_mean": False, "staleness_max": False, "wall_s": False, "union_steps_per_s": True,
    "bytes_per_worker": False, "peer_bytes": False, "target": False, "cost": False, "waiting_cost": False,
}  # fmt: skip


class Curves(BaseModel):
    """One run with its metrics over time."""

    run: StoredRun
    label: str  # its mode with the current options
    settings: dict[str, Any]  # that may affect training, by dotted key
    series: dict[str, list[Value]]  # recorded metrics in columns
    evaluations: list[EvaluatedPoint]
    is_up: dict[str, bool]  # of each metric of the evaluations: whether more is better


def described(metric: Metric) -> dict[str, Any]:
    """Returns a metric as the page needs it."""
    return {"name": metric.name, "label": metric.label, "help": metric.help, "unit": metric.unit.value,
            "is_rare": metric.is_rare}  # fmt: skip


def curves_of(run: StoredRun, view: View, store: Store | None) -> dict[str, Any]:
    """Returns the curves of a run as JSON. The run store has more metrics over time than the view of a run."""
    recorded = store.recorded(run.id) if store is not None else None
    names = {name for point in view.evaluations for name in point.metrics} | set(run.metrics)
    found = Curves(
        run=run, label=view.about.label or run.mode, settings=relevant_settings(view.about.settings),
        series=recorded or view.series, evaluations=view.evaluations, is_up={name: is_up(name) for name in names},
    )  # fmt: skip
    document: dict[str, Any] = finite(found.model_dump(mode="json"))
    return document


def differing(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns, for each run, the settings whose values differ between runs."""
    first: dict[str, Any] = {}
    varied: set[str] = set()
    for of_run in settings.values():
        varied.update(key for key, value in of_run.items() if key in first and first[key] != value)
        first.update((key, value) for key, value in of_run.items() if key not in first)
    lacking = {key for key in first if any(key not in of_run for of_run in settings.values() if of_run)}
    shown = varied | lacking
    return {run: {key: _plain(value) for key, value in of_run.items() if key in shown}
            for run, of_run in settings.items()}  # fmt: skip


def _plain(value: Any) -> Any:
    """Returns a value for a cell of a table."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def tags_of(text: Any) -> list[str]:
    """Returns the tags in a text, separated by spaces or commas. Raises ValueError, which says the limit."""
    if not isinstance(text, str):
        raise ValueError("tags are one text, separated by spaces")
    tags = list(dict.fromkeys(text.replace(",", " ").split()))
    if len(tags) > MAX_TAGS:
        raise ValueError(f"a run has at most {MAX_TAGS} tags, not {len(tags)}")
    if long := [tag for tag in tags if len(tag) > MAX_TAG_CHARACTERS or not tag.isprintable()]:
        raise ValueError(f"a tag has at most {MAX_TAG_CHARACTERS} printable characters, not {len(long[0])}")
    return tags
