"""Lists, shows, plots, exports, names and deletes runs of the run store."""

from __future__ import annotations

import fnmatch
import math
import operator
import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from ..common.config.conditions import Condition, condition
from ..common.errors import OutputError, UsageError, plain
from ..common.reporting.comparison import findings
from ..common.reporting.curve import add_trained, csv_text
from ..common.reporting.metrics import Display, shown_of_run
from ..common.reporting.output import write_result
from ..common.reporting.pictures import png, svg
from ..common.reporting.report import (
    FittingTable,
    comparison_table,
    duration,
    report_console,
    short_number,
    summary_table,
)
from ..common.reporting.summary import Summary
from ..common.runstore.reading import (
    IRRELEVANT_SETTINGS,
    RunStore,
    StoredRun,
    config_differences,
    relevant_settings,
    remove,
    rename,
)
from ..common.wire.json_text import to_json
from ..web.stored import summary_of, view_of, write_report

_STYLES = {"running": "green", "lost": "red", "stopped": "yellow"}
_STATES = {"lost": "crashed"}
_MOST_EVENTS = 12
_MOST_LISTED = 50  # rich takes a second to lay out a thousand
_COLUMNS, _ROWS = 72, 16
_OVER = {"step": "step", "time": "elapsed_s", "samples": "samples", "bytes": "num_bytes"}


def list_runs(path: Path, terms: list[str], most: int | None, *, as_json: bool) -> None:
    """Print a table of the newest runs that fit the filter, or all as JSON. Raises UsageError."""
    limit = most if most or as_json else _MOST_LISTED + 1
    with RunStore(path) as store:
        runs = store.runs(None if terms else limit)
        if terms:
            configs = store.configs(run.key for run in runs)
            settings = {key: relevant_settings(config) for key, config in configs.items()}
            runs = fitting(runs, settings, terms)[:limit]
    if as_json:
        print_json([run.model_dump() for run in runs])
        return
    is_cut = most is None and len(runs) > _MOST_LISTED
    runs = runs[: most or _MOST_LISTED]
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))[:3]
    names = ["run", "started", "state", "work", "mode", "steps", "took", *map(plain, metrics)]
    table = FittingTable(names, [*names[:7:-1], "took", "work", "started"], first=Column("run", no_wrap=True))
    for run in runs:
        steps = f"{run.step:,}/{run.steps:,}" if run.steps and run.step != run.steps else f"{run.step:,}"
        shown = [short_number(run.metrics[name]) if name in run.metrics else "-" for name in metrics]
        state = Text(_STATES.get(run.state, run.state), style=_STYLES.get(run.state, ""))
        name, work, mode = (Text(plain(text)) for text in (run.label, run.work, run.mode))
        table.add_row(name, _when(run.started_at), state, work, mode, steps, duration(run.elapsed_s), *shown)
    console = report_console()
    console.print(table if runs else "no run fits the filter" if terms else "there are no runs yet")
    if is_cut:
        console.print(Text(f"the newest {_MOST_LISTED}; -n 1000 shows more", style="dim"))


def show_run(path: Path, name: str, *, as_json: bool) -> None:
    """Print one run: its results, settings, machine and newest events."""
    with RunStore(path) as store:
        run = store.find(name)
        found, summary, events = _everything(store, run), store.summary(run), store.events(run)
    if as_json:
        print_json(found)
        return
    console = report_console()

    def line(text: str, style: str = "") -> None:
        console.print(Text(plain(text), style=style))

    line(f"{run.label}   {run.id}   {run.work}, {run.mode}   {_STATES.get(run.state, run.state)}", "bold")
    where = ", ".join(f"{key} {value}" for key, value in {**found["code"], **found["machine"]}.items() if value)
    starts = f", {run.starts} starts of its server" if run.starts > 1 else ""
    line(f"started {_when(run.started_at)}{starts}; {where}", "dim")
    if run.note:
        line(run.note)
    if script := found["config"].get("script"):
        line("   ".join(f"{name} {value}" for name, value in script.items()), "dim")
    if summary is not None:
        console.print(summary_table(summary.model_copy(update={"mode": plain(summary.mode)})))
    else:
        so_far = [(metric, getattr(run, metric.name)) for metric in shown_of_run(Display.STATUS)]
        line("   ".join(f"{metric.label} {metric.text(value)}" for metric, value in so_far if value is not None))
        if run.state != "running":
            line(f"last heartbeat {_when(run.heard_at)}")
    if run.ended_by:
        line(run.ended_by, "yellow")
    for point in found["evaluations"][-5:]:
        values = "   ".join(f"{key} {short_number(value)}" for key, value in point["metrics"].items())
        line(f"evaluated at step {point['step']:,}: {values}")
    if snapshots := found["snapshots"]:
        line(f"{len(snapshots)} snapshots, the newest {snapshots[-1]['path']}")
    for event in [event for event in events if event.kind != "evaluated"][-_MOST_EVENTS:]:
        line(f"{_when(event.at)}  {event.text}", "dim")


def export(path: Path, name: str, out: Path | None, *, as_json: bool) -> None:
    """Write the series of a run as CSV, or everything as JSON."""
    with RunStore(path) as store:
        run = store.find(name)
        if as_json or (out is not None and out.suffix == ".json"):
            write((to_json(_everything(store, run), indent=2) + "\n").encode(), out)
            return
        rows = [point.model_dump() for point in store.series(run)]
    write(csv_text(rows).encode(), out)


def _everything(store: RunStore, run: StoredRun) -> dict[str, Any]:
    summary = store.summary(run)
    lists = ("evaluations", "snapshots", "events", "series", "worker_series")
    return {
        "run": run.model_dump(), "summary": summary.model_dump() if summary else None,
        **{name: getattr(store, name)(run) for name in ("config", "code", "machine")},
        **{name: [item.model_dump() for item in getattr(store, name)(run)] for name in lists},
    }  # fmt: skip


def tag(path: Path, run_name: str, name: str, *, as_json: bool) -> None:
    """Name a run. Raises UsageError for a name that is taken or cannot be printed."""
    with RunStore(path) as store:
        run = store.find(run_name)
    if name == "last" or len(name) > 100 or name != plain(name):
        raise UsageError(f"a run cannot be called {plain(name)[:100]!r}",
                         fix="up to 100 characters that can be printed; `last` is the newest")  # fmt: skip
    with _changing(path, f"another run is called {name}"):
        rename(path, run.key, name or None)
    found = {"id": run.id, "name": name or None}
    print(to_json(found, indent=2) if as_json else f"{run.id} is {name or 'without a name'}")


def delete(path: Path, names: list[str], *, force: bool, as_json: bool) -> None:
    """Delete runs; those in progress only with `force`."""
    with RunStore(path) as store:
        runs = {run.key: run for run in map(store.find, names)}
    for run in runs.values():
        if run.state == "running" and not force:
            raise UsageError(f"run {run.label} is in progress", fix="end it first, or --force")
    with _changing(path):
        remove(path, runs)
    ids = [run.id for run in runs.values()]
    print(to_json({"deleted": ids}, indent=2) if as_json else f"deleted: {', '.join(ids)}")


@contextmanager
def _changing(path: Path, conflict: str = "") -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError:
        raise UsageError(conflict, fix="take that name away first: ps-runs tag NAME ''") from None
    except sqlite3.Error as error:
        fix = "close other programs that have it open, and check the folder's permissions"
        raise OutputError(f"{path} cannot be changed: {error}", fix=fix) from None


def _when(at: float) -> str:
    """The local time of `at` (Unix seconds): a clock time within a day, else with its date."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S" if time.time() - at < 86_400 else "%Y-%m-%d %H:%M")


# ---- shared by the commands --------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Print `value` as indented JSON."""
    print(to_json(value, indent=2))


def write(data: bytes, out: Path | None) -> None:
    """Write to a file, or to standard output. Raises OutputError."""
    if out is None:
        sys.stdout.write(data.decode())
    else:
        write_result(out, data)


def plot(path: Path, name: str, axes: tuple[str, str], out: Path | None, *, as_json: bool) -> None:
    """Plot a metric over an x axis (`axes`) as text, JSON, SVG or PNG. Raises UsageError."""
    metric, over = axes
    if over not in _OVER:
        raise UsageError(f"--over {over} is not one of {', '.join(_OVER)}", fix="--over step")
    with RunStore(path) as store:
        run = store.find(name)
        points = _points(store, run, metric, over)
    if as_json:
        print_json({"run": run.id, "metric": metric, "over": over, "points": [list(point) for point in points]})
    elif out is None:
        print("\n".join(_text_plot(points, plain(f"{run.label}: {metric} over {over}"))))
    elif out.suffix == ".svg":
        picture = svg([(run.label, points)], over).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write(f"{picture}\n".encode(), out)
    elif out.suffix != ".png":
        raise UsageError(f"--out {out}: a picture is an .svg or a .png", fix=f"--out {out.stem}.svg")
    elif not png(out, f"{run.label}: {metric}", [(run.label, points)], over):
        fix = "pip install 'paramserver[bench]', or --out FILE.svg, which needs nothing"
        raise UsageError("PNG needs matplotlib, which is not installed", fix=fix)


def _points(store: RunStore, run: StoredRun, metric: str, over: str) -> list[tuple[float, float]]:
    """Returns (x, value) of a series or of evaluations. Raises UsageError that names the known metrics."""
    metrics = [metric.name for metric in shown_of_run(Display.STATUS)]
    if metric in metrics:
        found = [(getattr(row, _OVER[over]), getattr(row, metric)) for row in store.series(run)]
    else:
        evaluated = store.evaluations(run)
        known = list(dict.fromkeys(name for point in evaluated for name in point.metrics))
        if metric not in known:
            raise UsageError(f"run {run.label} has no metric {metric}", fix=f"it has {', '.join([*metrics, *known])}")
        found = [(getattr(point, _OVER[over]), point.metrics.get(metric)) for point in evaluated]
    points = [(float(x), float(y)) for x, y in found if x is not None and y is not None and math.isfinite(y)]
    if len(points) < 2:
        message = f"run {run.label} has {len(points)} points of {metric} over {over}, and a plot needs two"
        raise UsageError(message, fix="lower server.status_interval_s for series, run.eval_every for evaluations")
    return points


def _text_plot(points: list[tuple[float, float]], title: str) -> list[str]:
    """Returns lines of text; several points in one column are drawn as their mean."""
    first, last = points[0][0], points[-1][0]
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(round((x - first) / ((last - first) or 1) * (_COLUMNS - 1)), []).append(y)
    means = {column: sum(ys) / len(ys) for column, ys in columns.items()}
    low, high = min(means.values()), max(means.values())
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for column, y in means.items():
        grid[round((high - y) / ((high - low) or 1) * (_ROWS - 1))][column] = "•"
    names = [short_number(high), *[""] * (_ROWS - 2), short_number(low)]
    width = max(map(len, names))
    lines = [f"{name:>{width}} │{''.join(row).rstrip()}" for name, row in zip(names, grid, strict=True)]
    end = f"{last:,.4g}"
    return [title, *lines, f"{'':{width}} └{'─' * _COLUMNS}", f"{'':{width}}  {first:<,.4g}{end:>{_COLUMNS - 6}}"]


# ---- the filter of `list`: words, and terms such as mode=ssp, loss<0.3, tags=baseline, lr!=0.1. As on the page ------


_TERM = re.compile(r"([A-Za-z_][\w.]*)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_ALIASES = {"run": "name", "task": "work", "script": "work", "tag": "tags", "workers": "num_workers"}


def fitting(
    runs: Sequence[StoredRun], settings: Mapping[int, Mapping[str, Any]], terms: Sequence[str]
) -> list[StoredRun]:
    """Returns the runs that fit all terms. `settings`: by a run's key. Raises UsageError for an unknown name."""
    known = [_values(run, settings.get(run.key, {})) for run in runs]
    found = list(zip(runs, known, strict=True))
    for term in terms:
        if (parsed := _TERM.fullmatch(term)) is None:
            word = term.lower()
            found = [item for item in found if any(word in text for text in _words(item[0]))]
            continue
        name, sign, wanted = _ALIASES.get(parsed[1], parsed[1]), parsed[2], parsed[3]
        if runs and not any(_find(values, name) for values in known):
            fix = "e.g. mode=ssp, lr<0.1, config.width=64, tags=baseline"
            raise UsageError(f"{term}: no run has '{name}'", fix=fix)
        found = [item for item in found if _fits(_find(item[1], name), sign, wanted)]
    return [run for run, _ in found]


def _words(run: StoredRun) -> list[str]:
    return [text.lower() for text in (run.id, run.label, run.mode, run.work, run.state, run.note, *run.tags)]


def _values(run: StoredRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all values of a run by name; the first of a name counts."""
    fields = run.model_dump(exclude={"metrics", "recorded"}) | {"name": run.label}
    return {**settings, **run.recorded, **run.metrics, **fields}


def _find(values: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the values of a name, or of settings that end in it; empty: there is none."""
    if name in values:
        return values[name] if isinstance(values[name], list) else [values[name]]
    return [value for key, value in values.items() if key.endswith(f".{name}")]


def _fits(values: list[Any], sign: str, wanted: str) -> bool:
    if sign == "!=":
        return not _fits(values, "=", wanted)
    right = _number(wanted)
    for value in values:
        left, text = _number(value), "none" if value is None else str(value).lower()
        if left is not None and right is not None:
            if _ORDERS[sign](left, right):
                return True
        elif sign == "=" and fnmatch.fnmatchcase(text, wanted.lower()):
            return True
    return False


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


# ---- comparing ------------------------------------------------------------------------------------
# Compares runs of the run store: a table, findings, and the settings that differ.


_MOST_IN_A_LABEL = 2


def compare(path: Path, names: Sequence[str], report: str | None, wanted: str | None, *, as_json: bool) -> None:
    """Print the runs side by side, findings, and how their settings differ.

    Runs that differ only in their seed share a label. `report`: a folder for report.html and report.md. `wanted`: a
    condition such as `accuracy>=0.95`; the table shows when each run reached it. Raises UsageError.
    """
    try:
        target = None if wanted is None else condition(wanted)
    except ValueError as error:
        raise UsageError(f"--target: {error}") from None
    with RunStore(path) as store:
        runs = list({run.key: run for run in map(store.find, names)}.values())
        if len(runs) < 2:
            raise UsageError("a comparison needs two runs", fix="ps-runs compare A B; ps-runs list names them")
        summaries = [store.summary(run) or summary_of(run, view_of(store, run)) for run in runs]
        for run, summary in zip(runs, summaries, strict=True):
            for row in store.series(run):
                add_trained(summary.trained, row)
        settings = config_differences(store.config(run) for run in runs)
    differs = {key: values for key, values in settings.items() if not key.startswith(IRRELEVANT_SETTINGS)}
    labels, notes = labels_of(runs, differs), _notes(runs)
    named = list(zip(labels, summaries, strict=True))
    texts = findings(named, target) if len({run.work for run in runs}) == 1 else []
    if report is not None:
        write_report(report, ", ".join(dict.fromkeys(run.work for run in runs)), named, notes, differs, target=target)
    if as_json:
        shown = [{"run": run.model_dump(), "label": label, "summary": summary.model_dump()}
                 for run, (label, summary) in zip(runs, named, strict=True)]  # fmt: skip
        print_json({"runs": shown, "differences": differs, "findings": texts, "notes": notes})
    else:
        _show(named, target, differs, [*texts, *notes])
    if report is not None and not as_json:
        print(f"the report is {report}/report.html")


def labels_of(runs: Sequence[StoredRun], differs: dict[str, list[Any]]) -> list[str]:
    """Returns each run's name, or its mode and its settings that differ from other runs of that mode.

    Runs get the same label, and are pooled, if nothing on record but their seed differs. A run whose work is not
    on record is not pooled.
    """
    labels, first = [], dict[str, StoredRun]()
    for index, run in enumerate(runs):
        alike = [other for other, item in enumerate(runs) if item.mode == run.mode and item.work == run.work]
        parts = [
            f"{key.rpartition('.')[2]}={values[index]}" for key, values in differs.items()
            if key not in ("run.seed", "run.mode") and any(values[other] != values[index] for other in alike)
        ]  # fmt: skip
        same = first.setdefault(repr((run.mode, run.work or run.id, run.model, parts)), run)
        work = f" {run.work}" if len({other.work for other in runs}) > 1 else ""
        models = {runs[other].model for other in alike}
        is_told_apart = len(parts) <= _MOST_IN_A_LABEL and len(models) == 1 and (bool(run.work) or len(alike) == 1)
        apart = ", ".join(parts) if is_told_apart else same.id[:6]
        labels.append(run.name or f"{run.mode}{work} {apart}".rstrip())
    return labels


def _notes(runs: Sequence[StoredRun]) -> list[str]:
    """Returns reasons not to compare these runs, as sentences."""
    notes = []
    works, models = {run.work for run in runs}, {run.model for run in runs if run.model}
    if len(works) > 1:
        notes.append(f"The runs have different tasks ({', '.join(sorted(works))}): compare times, waits and traffic, "
                     "not losses and accuracies.")  # fmt: skip
    elif len(models) > 1:
        notes.append("The runs train different models: each metric is of its own model.")
    states = {"running": "is in progress", "lost": "crashed"}
    return notes + [
        f"{run.label} {states[run.state]}: its metrics are those of step {run.step:,}."
        for run in runs if run.state in states
    ]  # fmt: skip


def _show(
    runs: list[tuple[str, Summary]], target: Condition | None, differs: dict[str, list[Any]], texts: list[str]
) -> None:
    console = report_console()
    console.print(comparison_table([(plain(label), summary) for label, summary in runs], target))
    if differs:
        columns = (Column(Text(plain(label))) for label, _ in runs)
        table = Table("setting", *columns, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for key, values in differs.items():
            table.add_row(Text(plain(key)), *(Text(plain(str(value))) for value in values))
        console.print()
        console.print(table)
    for text in texts:
        console.print(Text(plain(text), style="dim"))
