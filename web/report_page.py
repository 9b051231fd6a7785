"""The comparison of the dashboard as one HTML file: its modules, its style and the runs, without outside references."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..common.reporting.curve import TRAINED, is_up
from ..common.reporting.pictures import Curves
from ..common.reporting.report import Measure
from ..common.reporting.status import Status
from ..common.reporting.summary import Summary
from ..common.wire.json_text import finite, to_json
from .compared import IS_UP, described

Table = tuple[list[str], list[list[str]]]  # names of the columns, rows
Picture = tuple[str, str, str, Curves]  # name of the PNG, metric, unit of the x axis, curves

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import \{ (.+) \} from '\./(\w+\.js)';$", re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) ([\w$]+))", re.M)
_MAIN = "report.js"
_MOST_POINTS = 500  # of a run's series: the file stays small


def comparison_data(
    runs: Sequence[tuple[str, Summary]], columns: Sequence[Measure], differences: Mapping[str, Sequence[object]],
    *, are_alike: bool,
) -> dict[str, Any]:  # fmt: skip
    """Returns the runs in the form of `/api/runs/{run}/curves`, and the columns of the table of results."""
    names = {name for _, run in runs for name in (*run.final, *(name for point in run.curve for name in point.metrics))}
    directions = {name: is_up(name) for name in names}
    known = {f"eval.{name}": up for name, up in directions.items()} | IS_UP
    found = []
    for at, (label, run) in enumerate(runs):
        number = f"run {at + 1}"
        of_run = {
            "id": number, "mode": run.mode, "state": "done", "work": "", "metrics": run.final, "name": label,
            "values": {column.key: column.get(run) for column in columns},
        }  # fmt: skip
        evaluations = [point.model_dump() for point in run.curve]
        found.append({
            "run": of_run, "group": label, "series": _series(run), "evaluations": evaluations, "is_up": directions,
            "settings": {key: values[at] for key, values in differences.items()},
        })  # fmt: skip
    shown = [
        {"key": column.key, "label": column.name, "unit": column.unit, "is_up": known.get(column.key)}
        for column in columns
    ]
    metrics = {"recorded": [described(metric) for metric in Status.declared_metrics()], "is_up": IS_UP}
    return {"runs": found, "columns": shown, "metrics": metrics, "are_alike": are_alike}


def _series(run: Summary) -> dict[str, list[float | None]]:
    """Returns the training metrics over time, in columns. A long run has the last of every few points."""
    points = run.trained[::-1][:: -(-len(run.trained) // _MOST_POINTS) or 1][::-1]
    names = dict.fromkeys(name for point in points for name in point.metrics)
    columns = {name: [point.metrics.get(name) for point in points] for name in names}
    of_points = {name: [getattr(point, name) for point in points] for name in ("step", "elapsed_s", "num_bytes")}
    return {**columns, "loss": columns.get(TRAINED, []), **of_points}


def page(title: str, sentences: Sequence[str], data: Mapping[str, Any]) -> str:
    """Returns the whole file. The sentences are readable without JavaScript."""
    parts = {
        "title": escape(title), "style": _text("style.css") + _text("vendor/uPlot.min.css"),
        "findings": "".join(f"<li>{escape(text)}</li>" for text in sentences),
        "uplot": _text("vendor/uPlot.iife.min.js"), "code": bundled(_MAIN),
        "data": to_json(finite(data)).replace("<", "\\u003c"),  # no text of the data ends the script
    }  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("report.html"))


def bundled(main: str) -> str:
    """Returns a module and its imports as one script. Each module is a function that returns its exports."""
    scripts = [_as_function(name) for name in _in_order(main, [])]
    return "const modules = {};\n" + "\n".join(scripts)


def _in_order(name: str, known: list[str]) -> list[str]:
    """Returns the modules, each after its imports."""
    for found in _IMPORT.finditer(_text(name)):
        if found[2] not in known:
            _in_order(found[2], known)
    known.append(name)
    return known


def _as_function(name: str) -> str:
    text = _text(name)
    exported = ", ".join(found[1] for found in _EXPORT.finditer(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const { \1 } = modules['\2'];", text))
    return f"modules['{name}'] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
