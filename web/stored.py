"""Runs of the run store (`common/runstore`), also of other processes: read for the dashboard, compared, or written.

Data for comparisons in the browser: settings that differ, and the curves of each run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import count, product
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..common.config.conditions import Condition
from ..common.config.sections.launching import CostConfig
from ..common.errors import OutputError, ParamServerError
from ..common.reporting import markdown, pictures
from ..common.reporting.comparison import IS_UP, Runs, compare, comparison_cells, findings, target_of
from ..common.reporting.curve import TRAINED
from ..common.reporting.metrics import Metric, Value
from ..common.reporting.output import check_writable, write_result
from ..common.reporting.pictures.words import size
from ..common.reporting.summary import About, Cost, EvaluatedPoint, Status, Summary, Tick, View, Wait, series_of
from ..common.runstore import reading
from ..common.runstore.reading import RunStore, StoredRun, relevant_settings
from ..common.wire.json_text import finite, to_json

MAX_COMPARED = 40  # runs; also in runs.js
MAX_TAGS = 10
MAX_TAG_CHARACTERS = 40
_FRESH_S = 0.9  # a view is reused for this long
_MAX_EVENTS = 300
T = TypeVar("T")


class Store:
    """The run store's file. It is opened for each read, because it may be replaced while a dashboard runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[str, tuple[float, View]] = {}
        self._settings: dict[str, dict[str, Any]] = {}  # of runs that are over
        self._listed: tuple[list[tuple[int, int, int]], list[StoredRun]] = [], []

    def runs(self) -> list[StoredRun]:
        """Returns all runs, the newest first. Without a file there are none. An unchanged file is read once."""
        stamps = [*_stamp(self._path), *_stamp(self._path.with_name(f"{self._path.name}-wal"))]
        if stamps and stamps == self._listed[0]:
            return self._listed[1]
        runs = self._of_file(lambda store: store.runs())
        if runs is None:
            return []
        # A running process may crash, which changes nothing in the file.
        self._listed = [] if any(run.state == "running" for run in runs) else stamps, runs
        return runs

    def problem(self) -> str:
        """Returns why the file cannot be read. Empty if it can be read or does not exist."""
        try:
            RunStore(self._path).close()
        except ParamServerError as error:
            return f"{error.message}: {error.fix}" if self._path.is_file() else ""
        return ""

    def view(self, name: str) -> View | None:
        """Returns the view of one run, or None for an unknown run."""
        known = self._read.get(name)
        if known is not None and time.monotonic() - known[0] < _FRESH_S:
            return known[1]
        found = self._of_run(name, view_of)
        self._read.clear()
        if found is not None:
            self._read[name] = time.monotonic(), found
        return found

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns the settings of every run that may affect training, by run and dotted key."""
        runs = self.runs()
        unread = {run.key: run.id for run in runs if run.id not in self._settings}
        configs = self._of_file(lambda store: store.configs(unread))
        if configs is None:
            return {}
        read = {unread[key]: relevant_settings(config) for key, config in configs.items()}
        found = {run.id: self._settings.get(run.id) or read.get(run.id, {}) for run in runs}
        self._settings = {run.id: found[run.id] for run in runs if run.state != "running"}  # it may be changed
        return found

    def recorded(self, name: str) -> dict[str, list[Value]] | None:
        """Returns the recorded metrics of a run over time in columns, or None for an unknown run."""
        points = self._of_run(name, RunStore.series)
        names = [metric.name for metric in Status.declared_metrics()]
        return series_of(points, names) if points else None

    def summary(self, run: StoredRun) -> Summary | None:
        """Returns the results of a run that has ended, or None."""
        return self._of_file(lambda store: store.summary(run))

    def _of_file(self, read: Callable[[RunStore], T]) -> T | None:
        """Returns what `read` finds in the run store, or None if its file cannot be read."""
        try:
            with RunStore(self._path) as store:
                return read(store)
        except ParamServerError:
            return None

    def _of_run(self, name: str, read: Callable[[RunStore, StoredRun], T]) -> T | None:
        """Returns what `read` finds of one run, or None for an unknown run."""
        return self._of_file(lambda store: read(store, run) if (run := store.named(name)) is not None else None)

    def set_tags(self, name: str, tags: list[str]) -> bool:
        """Set the tags of a run. Returns False for an unknown run. Raises StoreError and sqlite3.Error."""
        with RunStore(self._path) as store:
            run = store.named(name)
        if run is None:
            return False
        reading.set_tags(self._path, run.key, tags)
        return True


def _stamp(path: Path) -> list[tuple[int, int, int]]:
    """Returns a value that changes with the file; empty for no file or an empty file. Readers leave an empty WAL."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [(found.st_ino, found.st_mtime_ns, found.st_size)] if found.st_size else []


def view_of(store: RunStore, run: StoredRun) -> View:
    """Returns the view as on the server's dashboard, without the last minute and the ranks that others wait for."""
    points, summary, workers = store.series(run), store.summary(run), store.newest_workers(run)
    about = About(
        run=run.id, mode=run.mode, label=summary.label if summary is not None else run.mode, task=run.work,
        started=run.started_at, server_incarnation=run.starts,
        version=str(store.code(run).get("paramserver", "")), settings=store.config(run),
    )  # fmt: skip
    view = View(about=about, evaluations=store.evaluations(run), series=series_of(points))
    view.add_snapshots(store.snapshots(run))
    view.events.extend(store.events(run)[-_MAX_EVENTS:])
    newest = view.evaluations[-1] if view.evaluations else None
    status = Status(mode=run.mode, waiting=run.waiting, workers=list(workers), evaluated=newest, recorded=run.recorded,
                    **run.row())  # fmt: skip
    view.newest = Tick(
        at=run.heard_at, clock_s=run.elapsed_s, status=status, is_over=run.state != "running",
        durable_version=view.snapshots[-1].version if view.snapshots else None,
        waits=[Wait(rank=worker.rank, why=worker.waiting_for) for worker in workers if worker.waiting_for],
        **({} if summary is None else {"cost": summary.cost, "final": summary.final, "staleness": summary.staleness}),
    )  # fmt: skip
    return view


# ---- comparisons ------------------------------------------------------------------------------


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


def curves_of(run: StoredRun, view: View, store: Store) -> dict[str, Any]:
    """Returns the curves of a run as JSON. The run store has more metrics over time than the view of a run."""
    found = Curves(
        run=run, label=view.about.label or run.mode, settings=relevant_settings(view.about.settings),
        series=store.recorded(run.id) or view.series, evaluations=view.evaluations,
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


# ---- report --------------------------------------------------------------------------------------
# Writes a comparison of runs as files for people: the dashboard's comparison as one HTML file, and Markdown.
#
# The HTML file has the modules and the style of the dashboard, and the runs, without outside references.


_FILES = ("report.html", "report.md")
_TRAINED = "Some runs have no evaluations (run.eval_every), so train_loss is drawn, which workers report."
_MOST_ROWS = 50  # rows of a curve in Markdown
_UNITS = {"s": "elapsed_s", "steps": "step", "bytes": "num_bytes"}  # of the x axis: attributes of Point
Table = tuple[list[str], list[list[str]]]  # names of the columns, rows
Picture = tuple[str, str, str, pictures.Curves]  # name of the PNG, metric, unit of the x axis, curves
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
        if pictures.png(Path(directory) / file, f"{name} over {unit}", curves, unit, line):
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


def _pictures(runs: Runs, target: Condition | None) -> list[tuple[str, str, str, pictures.Curves, float | None]]:
    """Returns the file, the metric, the unit of the x axis, the curves, and a value to mark."""
    found: list[tuple[str, str, str, pictures.Curves, float | None]] = []
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
