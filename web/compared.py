"""Data with which the browser compares runs: settings that differ, and the curves of each run."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError

from ..common.config.sections.launching import CostConfig
from ..common.reporting.metrics import Metric, Value
from ..common.reporting.summary import Cost, Summary
from ..common.reporting.view import EvaluatedPoint, View
from ..common.runstore.reading import StoredRun, relevant_settings
from ..common.wire.json_text import finite
from .stored import Store

MAX_COMPARED = 40  # runs; also in runs.js
MAX_TAGS = 10
MAX_TAG_CHARACTERS = 40


class Curves(BaseModel):
    """One run with its metrics over time."""

    run: StoredRun
    label: str  # its mode with the current options
    settings: dict[str, Any]  # that may affect training, by dotted key
    series: dict[str, list[Value]]  # recorded metrics in columns
    evaluations: list[EvaluatedPoint]


def described(metric: Metric) -> dict[str, Any]:
    """Returns a metric as the page needs it."""
    return {"name": metric.name, "label": metric.label, "help": metric.help, "unit": metric.unit.value,
            "is_rare": metric.is_rare}  # fmt: skip


def curves_of(run: StoredRun, view: View, store: Store | None) -> dict[str, Any]:
    """Returns the curves of a run as JSON. The run store has more metrics over time than the view of a run."""
    recorded = store.recorded(run.id) if store is not None else None
    found = Curves(
        run=run, label=view.about.label or run.mode, settings=relevant_settings(view.about.settings),
        series=recorded or view.series, evaluations=view.evaluations,
    )  # fmt: skip
    document: dict[str, Any] = finite(found.model_dump(mode="json"))
    return document


def summary_of(run: StoredRun, view: View) -> Summary:
    """Returns the results so far of a run without a summary: in progress, or crashed."""
    tick = view.newest
    found = Summary.model_validate({
        **run.row(), "mode": run.mode, "wall_s": run.elapsed_s, "final": run.metrics, "ended_by": run.ended_by,
        "curve": view.evaluations, "workers": tick.status.workers if tick is not None else [],
    })  # fmt: skip
    with suppress(ValidationError):  # another version wrote the configuration
        prices = CostConfig.model_validate(view.about.settings.get("cost", {}))
        found.cost = Cost.of(prices, found.wall_s, found.wait_share)
    return found


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
