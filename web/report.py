"""Writes a comparison of runs as files for people: the dashboard's comparison as one HTML file, and Markdown.

The HTML file has the modules and the style of the dashboard, and the runs, without outside references.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import count, product
from pathlib import Path
from typing import Any

from ..common.config.conditions import Condition
from ..common.errors import OutputError
from ..common.reporting import markdown
from ..common.reporting.comparison import IS_UP, Runs, compare, comparison_cells
from ..common.reporting.curve import TRAINED
from ..common.reporting.findings import findings, target_of
from ..common.reporting.output import check_writable, write_result
from ..common.reporting.pictures import Curves, png
from ..common.reporting.pictures.words import size
from ..common.reporting.status import Status
from ..common.reporting.summary import Summary
from ..common.wire.json_text import finite, to_json
from .stored import described

_FILES = ("report.html", "report.md")
_TRAINED = "Some runs have no evaluations (run.eval_every), so train_loss is drawn, which workers report."
_MOST_ROWS = 50  # rows of a curve in Markdown
_UNITS = {"s": "elapsed_s", "steps": "step", "bytes": "num_bytes"}  # of the x axis: attributes of Point
Table = tuple[list[str], list[list[str]]]  # names of the columns, rows
Picture = tuple[str, str, str, Curves]  # name of the PNG, metric, unit of the x axis, curves
STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import \{ (.+) \} from '\./(\w+\.js)';$", re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) ([\w$]+))", re.M)
_MOST_POINTS = 500  # of a run's series: the file stays small


def write_report(
    directory: str,
    title: str,
    runs: Runs,
    notes: Sequence[str] = (),
    differences: Mapping[str, Sequence[object]] | None = None,
    extra: tuple[Sequence[Table], Sequence[Picture]] = ((), ()),
    target: Condition | None = None,
) -> None:
    """Write `report.html` and `report.md` into a directory, and create it. Raises OutputError.

    The HTML is the comparison of the dashboard as one file. Both files name the best run, and have a table of all runs,
    the settings that differ (`differences`: by key, a value for each run) and curves. The curves of the Markdown are
    PNG files if matplotlib is installed. Runs of one name differ only in their seeds. `extra` tables and pictures
    follow. The default of `target` is a value that every run has reached.
    """
    prepare_report(directory)
    goal, differences = target or target_of(runs), differences or {}
    # Metrics of different tasks, which a note is about, are not ranked.
    are_alike = not any("different tasks" in note for note in notes)
    sentences = findings(runs, target) if are_alike else []
    remarks = [*notes, *([_TRAINED] if TRAINED in _shown(runs) else [])]
    data = comparison_data(runs, goal, differences, same_task=are_alike)
    html = page(title, sentences, {**data, "notes": remarks, "tables": extra[0], "pictures": extra[1]})
    tables = [comparison_cells(runs, goal), *extra[0]]
    if differences:
        head = ["setting", *(label for label, _ in runs)]
        tables.append((head, [[key, *map(str, values)] for key, values in differences.items()]))
    lines = [*markdown.heading(1, title)[1:], *markdown.items(sentences)]
    for table in tables:
        lines += markdown.table(*table)
    drawn = _pictures(runs, goal)
    for file, name, unit, curves in extra[1]:
        drawn.append((_file_of(file.removesuffix(".png"), [picture[0] for picture in drawn]), name, unit, curves, None))
    for file, name, unit, curves, line in drawn:
        if png(Path(directory) / file, f"{name} over {unit}", curves, unit, line):
            lines += markdown.image(f"{name} over {unit}", file)
    for name, (label, run) in product(_shown(runs), runs):
        points = run.points_of(name)
        if len(points) < 2:
            continue
        rows = []
        for point in points[:: -(-len(points) // _MOST_ROWS)]:
            traffic = "" if point.num_bytes is None else size(point.num_bytes)
            rows.append([f"{point.elapsed_s:,.1f}", f"{point.step:,}", f"{point.metrics[name]:.4f}", traffic])
        lines += [*markdown.heading(2, f"{label}: {name}"), *markdown.table(["s", "step", name, "traffic"], rows)]
    whole = "\n".join([*lines, *markdown.items(remarks)]) + "\n"
    for file, text in zip(_FILES, (html, whole), strict=True):
        write_result(Path(directory) / file, text.encode())


def _shown(runs: Runs) -> list[str]:
    """Returns the metrics with curves: those of evaluations, or of training if a run has no evaluations."""
    names = list(dict.fromkeys(name for _, run in runs for point in run.curve for name in point.metrics))
    shown: list[str] = [name for name in ("loss", "accuracy") if name in names] or names[:1]
    is_bare = any(max((len(run.points_of(name)) for name in shown), default=0) < 2 for _, run in runs)
    return [*shown, TRAINED] if is_bare and any(len(run.points_of(TRAINED)) > 1 for _, run in runs) else shown


def _pictures(runs: Runs, target: Condition | None) -> list[tuple[str, str, str, Curves, float | None]]:
    """Returns the file, the metric, the unit of the x axis, the curves, and a value to mark."""
    found: list[tuple[str, str, str, Curves, float | None]] = []
    for name in _shown(runs):
        line = target.bound if target is not None and target.metric == name else None
        for unit, attribute in _UNITS.items():
            curves = []
            for label, run in runs:
                points = [(getattr(point, attribute), point.metrics[name]) for point in run.points_of(name)]
                known = [(x, y) for x, y in points if x is not None and math.isfinite(y)]
                if len(known) > 1:
                    curves.append((label, known))
            if curves:
                files = [picture[0] for picture in found]
                found.append((_file_of(f"{name}-over-{unit}", files), name, unit, curves, line))
    return found


def _file_of(name: str, others: Sequence[str]) -> str:
    """Returns a short name of a picture, of ASCII letters, digits and `-`, that no other picture has."""
    base = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name[-80:])
    names = (f"{base}{f'-{number}' if number else ''}.png" for number in count())
    return next(found for found in names if found not in others)


def prepare_report(directory: str) -> None:
    """Create the directory. Raises OutputError if a report cannot be written there.

    It is called before a run, so that this error does not come after hours of training.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the report cannot be written to {directory}: {error.strerror}"
        raise OutputError(message, fix="name a directory that you may write to (--report DIR)") from None
    for name in _FILES:
        check_writable(str(Path(directory) / name))


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
    of_points = {name: [getattr(point, name) for point in points] for name in _UNITS.values()}
    return {**columns, "loss": columns.get(TRAINED, []), **of_points}


def page(title: str, sentences: Sequence[str], data: Mapping[str, Any]) -> str:
    """Returns the whole file. The sentences are readable without JavaScript."""
    parts = {
        "title": escape(title), "style": _text("style.css") + _text("vendor/uPlot.min.css"),
        "findings": "".join(f"<li>{escape(text)}</li>" for text in sentences),
        "uplot": _text("vendor/uPlot.iife.min.js"), "code": bundled("report.js"),
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
