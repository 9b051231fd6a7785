"""Runs of the run store (`common/runstore`) as the page shows them, also those that other processes write now."""

from __future__ import annotations

import time
from pathlib import Path

from ..common.errors import ParamServerError
from ..common.reporting.status import Status
from ..common.reporting.view import About, Tick, View, Wait, series_of
from ..common.runstore.reading import RunStore, StoredRun

_FRESH_S = 0.9  # what was read is shown again within this time
_MOST_EVENTS = 300


class Store:
    """The file of runs, opened for each question: it may be replaced, and a page may be open for days."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[str, tuple[float, View]] = {}
        self._listed: tuple[list[tuple[int, int, int]], list[StoredRun]] = [], []

    def runs(self) -> list[StoredRun]:
        """All runs, the newest first; none where there is no file. Read once while nobody writes."""
        stamps = [*_stamp(self._path), *_stamp(self._path.with_name(f"{self._path.name}-wal"))]
        if stamps and stamps == self._listed[0]:
            return self._listed[1]
        try:
            with RunStore(self._path) as store:
                runs = store.runs()
        except ParamServerError:
            return []
        # One that goes on may be lost without a word in the file.
        self._listed = [] if any(run.state == "running" for run in runs) else stamps, runs
        return runs

    def view(self, name: str) -> View | None:
        """All that the page shows of one run; None where it is not there."""
        known = self._read.get(name)
        if known is not None and time.monotonic() - known[0] < _FRESH_S:
            return known[1]
        try:
            with RunStore(self._path) as store:
                run = store.named(name)
                found = view_of(store, run) if run is not None else None
        except ParamServerError:
            return None
        self._read.clear()
        if found is not None:
            self._read[name] = time.monotonic(), found
        return found


def _stamp(path: Path) -> list[tuple[int, int, int]]:
    """What changes when the file does; nothing where there is none, or nothing in it: a reader leaves an empty WAL."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [(found.st_ino, found.st_mtime_ns, found.st_size)] if found.st_size else []


def view_of(store: RunStore, run: StoredRun) -> View:
    """As its server's own page would show it, without the last minute and the ranks that somebody waits for."""
    points, summary, workers = store.series(run), store.summary(run), store.newest_workers(run)
    about = About(
        run=run.id, mode=run.mode, label=summary.label if summary is not None else run.mode, task=run.work,
        started=run.started_at, server_incarnation=run.starts,
        version=str(store.code(run).get("paramserver", "")), settings=store.config(run),
    )  # fmt: skip
    view = View(about=about, evaluations=store.evaluations(run), series=series_of(points))
    view.add_snapshots(store.snapshots(run))
    view.events.extend(store.events(run)[-_MOST_EVENTS:])
    newest = view.evaluations[-1] if view.evaluations else None
    status = Status(mode=run.mode, waiting=run.waiting, workers=list(workers), evaluated=newest, **run.row())
    view.newest = Tick(
        at=run.heard_at, clock_s=run.elapsed_s, status=status, is_over=run.state != "running",
        durable_version=view.snapshots[-1].version if view.snapshots else None,
        waits=[Wait(rank=worker.rank, why=worker.waiting_for) for worker in workers if worker.waiting_for],
        **({} if summary is None else {"cost": summary.cost, "final": summary.final, "staleness": summary.staleness}),
    )  # fmt: skip
    return view
