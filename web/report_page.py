"""The comparison of the dashboard as one HTML file: its modules, its style and the runs, without outside references."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..common.config.conditions import Condition
from ..common.reporting.comparison import IS_UP, Runs, compare
from ..common.reporting.curve import TRAINED
from ..common.reporting.pictures import Curves
from ..common.reporting.status import Status
from ..common.reporting.summary import Summary
from ..common.wire.json_text import finite, to_json
from .compared import described

Table = tuple[list[str], list[list[str]]]  # names of the columns, rows
Picture = tuple[str, str, str, Curves]  # name of the PNG, metric, unit of the x axis, curves

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import \{ (.+) \} from '\./(\w+\.js)';$", re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) ([\w$]+))", re.M)
_MAIN = "report.js"
_MOST_POINTS = 500  # of a run's series: the file stays small


def comparison_data(
    runs: Runs, target: Condition | None, differences: Mapping[str, Sequence[object]], *, same_task: bool
) -> dict[str, Any]:
    """Returns the runs in the form of `/api/runs/{run}/curves`, and their results as `/api/compare` has them.

    The results are by the number of the first run of each row: once with seeds together, once with each run alone.
    """
    ids = [f"run {at}" for at in range(1, len(runs) + 1)]
    first = dict(reversed([(label, number) for (label, _), number in zip(runs, ids, strict=True)]))
    found = []
    for at, (label, run) in enumerate(runs):
        of_run = {"id": ids[at], "mode": run.mode, "state": "done", "work": "", "metrics": run.final, "name": label}
        found.append({
            "run": of_run, "group": label, "series": _series(run),
            "evaluations": [point.model_dump() for point in run.curve],
            "settings": {key: values[at] for key, values in differences.items()},
        })  # fmt: skip
    together, alone = ([(name, run) for name, (_, run) in zip(names, runs, strict=True)]
                       for names in ([first[label] for label, _ in runs], ids))  # fmt: skip
    results = {kind: compare(named, target, same_task=same_task).model_dump()
               for kind, named in (("together", together), ("alone", alone))}  # fmt: skip
    metrics = {"recorded": [described(metric) for metric in Status.declared_metrics()], "is_up": IS_UP}
    return {"runs": found, "results": results, "metrics": metrics}


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
    whole = "const modules = {};"
    for name in _in_order(main, []):
        text = _text(name)
        exported = ", ".join(found[1] for found in _EXPORT.finditer(text))
        body = _EXPORT.sub("", _IMPORT.sub(r"const { \1 } = modules['\2'];", text))
        whole += f"\nmodules['{name}'] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"
    return whole


def _in_order(name: str, known: list[str]) -> list[str]:
    """Returns the modules, each after its imports."""
    for found in _IMPORT.finditer(_text(name)):
        if found[2] not in known:
            _in_order(found[2], known)
    known.append(name)
    return known


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
