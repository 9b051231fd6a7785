"""Runs of the run store (`common/runstore`), including runs of other processes: read for the dashboard, and compared.

Data for comparisons in the browser: settings that differ, and the curves of each run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..common.config.sections.launching import CostConfig
from ..common.errors import ParamServerError
from ..common.reporting.metrics import Metric, Value
from ..common.reporting.status import Status
from ..common.reporting.summary import Cost, Summary
from ..common.reporting.view import About, EvaluatedPoint, Tick, View, Wait, series_of
from ..common.runstore import changing
from ..common.runstore.reading import RunStore, StoredRun, relevant_settings
from ..common.wire.json_text import finite

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
        changing.set_tags(self._path, run.key, tags)
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
