"""Runs on record (`common/runstore`) as the page shows them: finished ones, and those that others write now."""

from __future__ import annotations

import time
from pathlib import Path

from ..common.errors import ParamServerError
from ..common.reporting.status import Status, WorkerStatus
from ..common.reporting.summary import Summary, WorkerSummary
from ..common.reporting.watched import About, Line, Snapshot, Tick, Totals, Wait, Watched
from ..common.runstore.happenings import happened
from ..common.runstore.reading import RunStore, StoredRun, WorkerPoint

_FRESH_S = 0.9  # what was read is shown again within this time
_MOST_EVENTS = 300
_SAID = (
    "mode", "project", "state", "step", "steps", "version", "loss", "samples", "samples_per_s", "num_bytes",
    "elapsed_s", "figures", "ended_by",
)  # fmt: skip


class Store:
    """The file of runs, opened for each question: it may be replaced, and a page may be open for days."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[str, tuple[float, Watched]] = {}
        self._listed: tuple[list[tuple[int, int, int]], list[Line]] = [], []

    def runs(self) -> list[Line]:
        """A line each, the newest first; none where there is no file. Read once while nobody writes."""
        stamps = [*_stamp(self._path), *_stamp(self._path.with_name(f"{self._path.name}-wal"))]
        if stamps and stamps == self._listed[0]:
            return self._listed[1]
        try:
            with RunStore(self._path) as store:
                lines = [line(run) for run in store.runs()]
        except ParamServerError:
            return []
        # One that goes on may be lost without a word in the file.
        self._listed = [] if any(one.state == "running" for one in lines) else stamps, lines
        return lines

    def watched(self, name: str) -> Watched | None:
        """All that the page shows of one; None where it is not there."""
        known = self._read.get(name)
        if known is not None and time.monotonic() - known[0] < _FRESH_S:
            return known[1]
        try:
            with RunStore(self._path) as store:
                run = store.named(name)
                found = of_run(store, run) if run is not None else None
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


def line(run: StoredRun) -> Line:
    return Line.model_construct(
        run=run.id, name=run.label, task=run.work, started=run.started_at, workers=run.num_workers,
        **{name: getattr(run, name) for name in _SAID},
    )  # fmt: skip


def of_run(store: RunStore, run: StoredRun) -> Watched:
    """As its server's own page would show it, without what is not kept: for whom somebody waits, the last minute."""
    points, summary = store.series(run), store.summary(run)
    label = summary.label if summary is not None else run.mode
    about = About(
        run=run.id, mode=run.mode, label=label, task=run.work, started=run.started_at, server_incarnation=run.starts,
        version=str(store.code(run).get("paramserver", "")), settings=store.config(run),
    )  # fmt: skip
    by_tick = store.shares(run)
    shares = [by_tick.get(one.tick, (None, None)) for one in points]
    watched = Watched(about=about, evaluations=list(store.evaluations(run)))
    watched.series |= {
        "elapsed_s": [one.elapsed_s for one in points], "step": [float(one.step) for one in points],
        "version": [float(one.version) for one in points], "loss": [one.loss for one in points],
        "samples": [None if one.samples is None else float(one.samples) for one in points],
        "bytes": [float(one.num_bytes) for one in points],
        "samples_per_s": [one.samples_per_s for one in points], "wait_share": [waits for waits, _ in shares],
        "staleness_mean": [behind for _, behind in shares],
    }  # fmt: skip
    watched.has_taken(Snapshot(version=one.version, at=one.at, path=one.path) for one in store.checkpoints(run))
    watched.events.extend(happened(one.at, one.kind, one.rank, one.fields) for one in store.events(run)[-_MOST_EVENTS:])
    newest = points[-1].tick if points else 0
    workers = store.worker_series(run, after=newest - 1) if points else []
    watched.newest = _tick(run, workers, summary, store)
    return watched


def _tick(run: StoredRun, workers: list[WorkerPoint], summary: Summary | None, store: RunStore) -> Tick:
    shown = [_worker(one) for one in workers]
    evaluations = store.evaluations(run)
    status = Status(
        mode=run.mode, version=run.version, elapsed_s=run.elapsed_s, step=run.step, steps=run.steps,
        num_joined=run.num_workers, waiting=run.waiting, workers=shown,
        evaluated=evaluations[-1] if evaluations else None,
    )  # fmt: skip
    if summary is None:
        fields = set(WorkerSummary.model_fields)
        rows = [WorkerSummary(steps=one.step, **one.model_dump(include=fields)) for one in workers]
        summary = Summary(mode=run.mode, updates=run.version, version=run.version, wall_s=run.elapsed_s, workers=rows)
    else:
        counted = {one.rank: one.contributions for one in summary.workers}
        for one in shown:
            one.contributions = counted.get(one.rank)
    durable = store.checkpoints(run)
    return Tick(
        at=run.heard_at, clock_s=run.elapsed_s, status=status, totals=Totals.of(summary), staleness=summary.staleness,
        durable_version=durable[-1].version if durable else None, is_over=run.state != "running",
        waits=[Wait(rank=one.rank, why=one.waiting_for) for one in workers if one.waiting_for],
    )  # fmt: skip


def _worker(one: WorkerPoint) -> WorkerStatus:
    total = one.compute_s + one.transfer_s + one.wait_s or 1.0
    same = one.model_dump(include=set(WorkerStatus.model_fields))
    shares = {"compute_share": one.compute_s, "transfer_share": one.transfer_s, "wait_share": one.wait_s}
    return WorkerStatus(**{**same, **{name: round(part / total, 3) for name, part in shares.items()}})
