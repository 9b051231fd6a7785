"""Runs on record, read: finished ones, those that go on, and those that ended without a word. Nothing is changed.

    with RunStore(Path("runs/paramserver.db")) as store:
        for run in store.runs():
            print(run.id, run.state, run.metrics)
        one = store.find("sync-baseline")
        points = store.series(one)

What is read is as of the moment it is asked; `RunStore` may stay open while runs go on, and is used by one thread at
a time. Everything that people have named (runs, tasks, lines) is data: who shows it escapes it.
"""

from __future__ import annotations

import difflib
import math
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationError

from ..errors import UsageError
from ..reporting.curve import MetricValue
from ..reporting.happenings import event
from ..reporting.status import Measured, WorkerStatus
from ..reporting.summary import Summary
from ..reporting.view import EvaluatedPoint, Event, Snapshot
from ..wire.json_text import read_json
from .process import still_writes
from .schema import open_to_read, unreadable

if TYPE_CHECKING:
    from ..reporting.pictures.notebook import Card

# Settings that differ between any two runs, or do not affect training.
IRRELEVANT_SETTINGS = ("output.", "log.", "launch.", "server.listen", "server.web", "checkpoint.dir", "server.metrics",
                       "worker.rank")  # fmt: skip
_LEAST_OF_AN_ID = 4  # characters
_INTERNAL = frozenset({"run", "host", "process", "heartbeat_s", "stride"})  # columns


class StoredRun(Measured):
    """A run, without what is long. Times `..._at` are Unix seconds."""

    id: str
    key: int = 0  # in the file
    name: str | None = None  # that its user gave it
    tags: list[str] = Field(default_factory=list)
    project: str = ""
    mode: str = ""
    work: str = ""  # the task, or the script
    model: str = ""  # fingerprint of what was trained; empty: nothing yet
    state: str = ""  # running, done, stopped, or lost (crashed); on a server's own page live or over
    starts: int = 1  # of its server
    started_at: float = 0.0
    heard_at: float = 0.0
    ended_at: float | None = None
    ended_by: str = ""  # who stopped it and why, or what failed; empty: all steps were taken
    waiting: str = ""
    metrics: dict[str, MetricValue] = Field(default_factory=dict)  # final, or of the newest evaluation
    recorded: dict[str, MetricValue] = Field(default_factory=dict)  # as in a status

    @property
    def label(self) -> str:
        """For people."""
        return self.name or f"{self.mode}-{self.id[:6]}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For a notebook; `RunStore.card` has its curves."""
        from ..reporting.pictures.cards import of_stored

        return of_stored(self, [], []).bundle()


class SeriesPoint(Measured):
    """The run at one moment; `tick` counts, those in between were not kept."""

    tick: int
    at: float
    waiting: str
    recorded: dict[str, MetricValue] = Field(default_factory=dict)


class WorkerPoint(WorkerStatus):
    """One rank at the moment of the run's `tick`; sums are since it first joined."""

    tick: int


class StoredEvent(Event):
    number: int
    fields: Mapping[str, Any]


class RunStore:
    """The file at `path`. StoreError for one that is not there, cannot be read, or is newer than this program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = open_to_read(path)
        self._db.row_factory = sqlite3.Row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # ---- runs -------------------------------------------------------------------------------

    def runs(self, most: int | None = None) -> list[StoredRun]:
        """The newest first."""
        limit = -1 if most is None else most
        return [_run(row) for row in self._rows("SELECT * FROM runs ORDER BY started_at DESC, key DESC LIMIT ?", limit)]

    def find(self, wanted: str) -> StoredRun:
        """By its name, its id or the beginning of one, or the label in a list; `last` is the newest. UsageError
        names the nearest, or those that it may be."""
        runs = self.runs()
        if wanted == "last" and runs:
            return runs[0]
        for exact in (
            [run for run in runs if wanted in (run.name, run.id)],
            [run for run in runs if wanted == run.label],
        ):
            if len(exact) == 1:
                return exact[0]
        fits = [run for run in runs if len(wanted) >= _LEAST_OF_AN_ID and run.id.startswith(wanted)]
        if len(fits) == 1:
            return fits[0]
        if fits:
            raise UsageError(f"run {wanted} may be {', '.join(run.id for run in fits[:5])}", fix="give more of its id")
        known = [known for run in runs for known in (run.name, run.label, run.id) if known]
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
        fix = f"did you mean '{near[0]}'?" if near else "`ps-runs list` names those that are there"
        raise UsageError(f"there is no run {wanted} in {self.path}", fix=fix)

    def card(self, run: StoredRun) -> Card:
        """What a notebook shows of a run: its metrics, its loss, its evaluations."""
        from ..reporting.pictures.cards import of_stored

        return of_stored(run, self.series(run), self.evaluations(run))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For a notebook: the newest runs."""
        from ..reporting.pictures.cards import of_list

        return of_list(str(self.path), self.runs(20)).bundle()

    def run(self, key: int) -> StoredRun | None:
        """By its key; None when it is there no more."""
        rows = self._rows("SELECT * FROM runs WHERE key = ?", key)
        return _run(rows[0]) if rows else None

    def named(self, wanted: str) -> StoredRun | None:
        """By its whole id or its name, without a look at the others; the newest of several."""
        rows = self._rows("SELECT * FROM runs WHERE id = ? OR name = ? ORDER BY key DESC LIMIT 1", wanted, wanted)
        return _run(rows[0]) if rows else None

    def configs(self, keys: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Returns the configurations of runs, by the runs' keys."""
        wanted = set(keys)
        rows = self._rows("SELECT run, body FROM documents WHERE name = 'config'")
        found = {row["run"]: _json(row["body"]) for row in rows if row["run"] in wanted}
        return {key: config for key, config in found.items() if isinstance(config, dict)}

    # ---- of a run -----------------------------------------------------------------------------

    def series(self, run: StoredRun, after: int = 0) -> list[SeriesPoint]:
        """What came after a tick, in order; at most a thousand in all."""
        rows = self._rows("SELECT * FROM series WHERE run = ? AND tick > ? ORDER BY tick", run.key, after)
        return [SeriesPoint.of(**_without_run(row)) for row in rows]

    def worker_series(self, run: StoredRun, rank: int | None = None, after: int = 0) -> list[WorkerPoint]:
        """Of one rank or all, by tick and rank. Of very many, a moment has the 64 that others waited for."""
        which = "" if rank is None else " AND rank = ?"
        question = f"SELECT * FROM worker_series WHERE run = ? AND tick > ?{which} ORDER BY tick, rank"
        rows = self._rows(question, run.key, after, *(() if rank is None else (rank,)))
        return [WorkerPoint.of(**_without_run(row)) for row in rows]

    def newest_workers(self, run: StoredRun) -> list[WorkerPoint]:
        """The workers at the newest moment that is kept."""
        rows = self._rows("SELECT max(tick) AS tick FROM series WHERE run = ?", run.key)
        newest = rows[0]["tick"]
        return [] if newest is None else self.worker_series(run, after=newest - 1)

    def events(self, run: StoredRun, after: int = 0) -> list[StoredEvent]:
        """Those with a number beyond `after`."""
        rows = self._rows("SELECT * FROM events WHERE run = ? AND number > ? ORDER BY number", run.key, after)
        return [_event(row) for row in rows]

    def evaluations(self, run: StoredRun) -> list[EvaluatedPoint]:
        rows = self._rows("SELECT * FROM evaluations WHERE run = ? ORDER BY version", run.key)
        return [EvaluatedPoint(**{**_without_run(row), "metrics": _metrics(row["metrics"])}) for row in rows]

    def snapshots(self, run: StoredRun) -> list[Snapshot]:
        rows = self._rows("SELECT * FROM snapshots WHERE run = ? ORDER BY version", run.key)
        return [Snapshot(**_without_run(row)) for row in rows]

    def summary(self, run: StoredRun) -> Summary | None:
        """Final metrics as `--summary` writes them; None of a run that goes on or ended without a word."""
        try:
            return Summary.model_validate(document) if (document := self._document(run, "summary")) else None
        except ValidationError:
            return None

    def config(self, run: StoredRun) -> dict[str, Any]:
        """The configuration as it was resolved, by section; without what is secret."""
        return self._document(run, "config")

    def machine(self, run: StoredRun) -> dict[str, Any]:
        """Where its server ran last."""
        return self._document(run, "machine")

    def code(self, run: StoredRun) -> dict[str, Any]:
        """Versions: of this program, and the commit of the folder that the server was started in, where it has one."""
        return self._document(run, "code")

    # ---- how ----------------------------------------------------------------------------------

    def _document(self, run: StoredRun, name: str) -> dict[str, Any]:
        rows = self._rows("SELECT body FROM documents WHERE run = ? AND name = ?", run.key, name)
        found = _json(rows[0]["body"]) if rows else {}
        return found if isinstance(found, dict) else {}

    def _rows(self, question: str, *values: object) -> list[sqlite3.Row]:
        try:
            return self._db.execute(question, values).fetchall()
        except sqlite3.Error as error:
            raise unreadable(self.path, error) from None


def relevant_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that may affect training, by dotted key."""
    return {key: value for key, value in _leaves(config) if not key.startswith(IRRELEVANT_SETTINGS)}


def config_differences(configs: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """By dotted key, the value of each configuration where they are not all equal; None where one has no such key."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = dict.fromkeys(key for item in flat for key in item)
    found = {key: [item.get(key) for item in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _leaves(value: dict[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{before}{name}.")
        else:
            yield f"{before}{name}", inner


def _run(row: sqlite3.Row) -> StoredRun:
    columns = {**_without_run(row), "metrics": _metrics(row["metrics"]), "state": _state(row)}
    return StoredRun.of(**{**columns, "tags": row["tags"].split()})


def _event(row: sqlite3.Row) -> StoredEvent:
    found = event(row["at"], row["kind"], row["rank"], _json(row["fields"]))
    return StoredEvent(number=row["number"], fields=found.fields, **found.model_dump())


def _state(row: sqlite3.Row) -> str:
    if row["ended_at"] is not None:
        return "stopped" if row["ended_by"] else "done"
    lives = still_writes(row["host"], row["process"], row["heard_at"], row["heartbeat_s"])
    return "running" if lives else "lost"


def _without_run(row: sqlite3.Row) -> dict[str, Any]:
    found = {name: row[name] for name in row.keys() if name not in _INTERNAL}  # noqa: SIM118
    if "recorded" in found:
        found["recorded"] = {name: value for name, value in _json(found["recorded"]).items() if value is not None}
    return found


def _metrics(text: str) -> dict[str, float]:
    """Null stands for a number that was not finite."""
    return {name: math.nan if value is None else value for name, value in _json(text).items()}


def _json(text: str) -> Any:
    try:
        return read_json(text, nan=True, big=True)
    except ValueError:
        return {}
