"""Reads runs from the run store: finished, running and crashed runs. `RunStore` changes nothing; the last functions do.

    with RunStore(Path("runs/paramserver.db")) as store:
        for run in store.runs():
            print(run.id, run.state, run.metrics)
        baseline = store.find("sync-baseline")
        points = store.series(baseline)

Each call reads the current state of the file. A `RunStore` may stay open while runs go on. One thread at a time may
use it. Names of runs, tasks and metrics come from users: code that displays them must escape them.
"""

from __future__ import annotations

import difflib
import math
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationError

from .. import synonyms
from ..errors import UsageError
from ..reporting.curve import MetricValue
from ..reporting.summary import EvaluatedPoint, Event, Measured, Snapshot, Summary, WorkerStatus, event
from ..wire.json_text import read_json
from .process import still_writes
from .schema import OF_A_RUN, open_to_read, open_to_write, unreadable

if TYPE_CHECKING:
    from ..reporting.pictures.notebook import Card


# Settings that differ between any two runs, or do not affect training.
IRRELEVANT_SETTINGS = ("output.", "launch.serve", "server.listen", "server.web", "checkpoint.dir", "server.metrics")
_LEAST_OF_AN_ID = 4  # characters
_INTERNAL = frozenset({"run", "host", "process", "heartbeat_s", "stride"})  # columns


class StoredRun(Measured):
    """The short columns of a run. Times `..._at` are Unix seconds."""

    id: str
    key: int = 0  # in the file
    name: str | None = None  # given by its user
    note: str = ""
    tags: list[str] = Field(default_factory=list)
    project: str = ""
    mode: str = ""
    work: str = ""  # the task, or the script
    model: str = ""  # fingerprint of the trained model; empty: none yet
    state: str = ""  # running, done, stopped, or lost (crashed); on a server's own dashboard: live or over
    starts: int = 1  # of its server
    started_at: float = 0.0
    heard_at: float = 0.0
    ended_at: float | None = None
    ended_by: str = ""  # who stopped it and why, or the failure; empty: all steps were taken
    waiting: str = ""
    metrics: dict[str, MetricValue] = Field(default_factory=dict)  # final, or of the newest evaluation
    recorded: dict[str, MetricValue] = Field(default_factory=dict)  # as in a status

    @property
    def label(self) -> str:
        """Returns the name of the run, or e.g. digits-ssp-12: what it runs, its mode and its number in the file."""
        parts = [re.split(r"[ :/]", text)[-1].removesuffix(".py") for text in (self.work, self.mode)]
        return self.name or "-".join(filter(None, (*parts, str(self.key or self.id[:6]))))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Returns the run for a notebook; `RunStore.card` adds its curves."""
        from ..reporting.pictures.notebook import of_stored

        return of_stored(self, [], []).bundle()


class SeriesPoint(Measured):
    """The run at one moment. `tick` numbers all statuses; the run store keeps only some of them."""

    tick: int
    at: float
    waiting: str
    recorded: dict[str, MetricValue] = Field(default_factory=dict)


class WorkerPoint(WorkerStatus):
    """A worker at the run's `tick`; sums count from the first join of its rank."""

    tick: int


class StoredEvent(Event):
    number: int
    fields: Mapping[str, Any]


class RunStore:
    """Reads the run store at `path`. Raises StoreError if it is missing, unreadable, or of a newer version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = open_to_read(path)
        self._db.row_factory = sqlite3.Row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # ---- runs -------------------------------------------------------------------------------

    def runs(self, most: int | None = None) -> list[StoredRun]:
        """Returns the runs, the newest first; `most` limits their number."""
        limit = -1 if most is None else most
        return [_run(row) for row in self._rows("SELECT * FROM runs ORDER BY started_at DESC, key DESC LIMIT ?", limit)]

    def find(self, wanted: str) -> StoredRun:
        """Find a run by its name, its id, the beginning of its id, or its label; `last` is the newest run.

        Raises UsageError that names the nearest known name, or all runs that match.
        """
        runs = self.runs()
        if wanted == "last" and runs:
            return runs[0]
        exact = [run for run in runs if wanted in (run.name, run.id)]
        labelled = [run for run in runs if wanted == run.label]
        begun = [run for run in runs if len(wanted) >= _LEAST_OF_AN_ID and run.id.startswith(wanted)]
        for found in (exact, labelled, begun):
            if len(found) == 1:
                return found[0]
        if fits := begun or labelled:
            raise UsageError(f"run {wanted} may be {', '.join(run.id for run in fits[:5])}", fix="give more of its id")
        known = [known for run in runs for known in (run.name, run.label, run.id) if known]
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
        fix = f"did you mean '{near[0]}'?" if near else "`ps-runs list` names those that are there"
        fix = synonyms.RUNS.get(wanted, fix)
        raise UsageError(f"there is no run {wanted} in {self.path}", fix=fix)

    def card(self, run: StoredRun) -> Card:
        """Returns a notebook card of a run: its metrics, its loss, its evaluations."""
        from ..reporting.pictures.notebook import of_stored

        return of_stored(run, self.series(run), self.evaluations(run))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Returns the newest runs for a notebook."""
        from ..reporting.pictures.notebook import of_list

        return of_list(str(self.path), self.runs(20)).bundle()

    def run(self, key: int) -> StoredRun | None:
        """Returns the run with this key; None if it was deleted."""
        rows = self._rows("SELECT * FROM runs WHERE key = ?", key)
        return _run(rows[0]) if rows else None

    def named(self, wanted: str) -> StoredRun | None:
        """Returns the run with this id or name, the newest of several; None if there is none."""
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
        """Returns the points after a tick, in order; at most a thousand."""
        rows = self._rows("SELECT * FROM series WHERE run = ? AND tick > ? ORDER BY tick", run.key, after)
        return [SeriesPoint.of(**_columns(row)) for row in rows]

    def worker_series(self, run: StoredRun, rank: int | None = None, after: int = 0) -> list[WorkerPoint]:
        """Returns the points of one rank or of all, by tick and rank.

        With many workers, a tick has only the 64 workers that others waited for.
        """
        which = "" if rank is None else " AND rank = ?"
        question = f"SELECT * FROM worker_series WHERE run = ? AND tick > ?{which} ORDER BY tick, rank"
        rows = self._rows(question, run.key, after, *(() if rank is None else (rank,)))
        return [WorkerPoint.of(**_columns(row)) for row in rows]

    def newest_workers(self, run: StoredRun) -> list[WorkerPoint]:
        """Returns the workers at the newest stored tick."""
        ((newest,),) = self._rows("SELECT max(tick) FROM series WHERE run = ?", run.key)
        return [] if newest is None else self.worker_series(run, after=newest - 1)

    def events(self, run: StoredRun, after: int = 0) -> list[StoredEvent]:
        """Returns the events whose number is greater than `after`."""
        rows = self._rows("SELECT * FROM events WHERE run = ? AND number > ? ORDER BY number", run.key, after)
        read = [(row["number"], event(row["at"], row["kind"], row["rank"], _json(row["fields"]))) for row in rows]
        return [StoredEvent(number=number, fields=item.fields, **item.model_dump()) for number, item in read]

    def evaluations(self, run: StoredRun) -> list[EvaluatedPoint]:
        rows = self._rows("SELECT * FROM evaluations WHERE run = ? ORDER BY version", run.key)
        return [EvaluatedPoint(**_columns(row)) for row in rows]

    def snapshots(self, run: StoredRun) -> list[Snapshot]:
        rows = self._rows("SELECT * FROM snapshots WHERE run = ? ORDER BY version", run.key)
        return [Snapshot(**_columns(row)) for row in rows]

    def summary(self, run: StoredRun) -> Summary | None:
        """Returns the results as `--summary` writes them; None if the run is in progress or crashed."""
        try:
            return Summary.model_validate(document) if (document := self._document(run, "summary")) else None
        except ValidationError:
            return None

    def config(self, run: StoredRun) -> dict[str, Any]:
        """Returns the resolved configuration by section, without secrets."""
        return self._document(run, "config")

    def machine(self, run: StoredRun) -> dict[str, Any]:
        """Returns the machine on which the server ran last."""
        return self._document(run, "machine")

    def code(self, run: StoredRun) -> dict[str, Any]:
        """Returns the version of this program, as `paramserver`."""
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
    if row["ended_at"] is not None:
        state = "stopped" if row["ended_by"] else "done"
    else:
        lives = still_writes(row["host"], row["process"], row["heard_at"], row["heartbeat_s"])
        state = "running" if lives else "lost"
    return StoredRun.of(**{**_columns(row), "state": state, "tags": row["tags"].split()})


def _columns(row: sqlite3.Row) -> dict[str, Any]:
    """Returns the columns of a row without those of the file's own use. Metrics are read from JSON."""
    found = {name: row[name] for name in row.keys() if name not in _INTERNAL}  # noqa: SIM118
    if "recorded" in found:
        found["recorded"] = {name: value for name, value in _json(found["recorded"]).items() if value is not None}
    if "metrics" in found:  # null stands for a number that is not finite
        values = _json(found["metrics"]).items()
        found["metrics"] = {name: math.nan if value is None else value for name, value in values}
    return found


def _json(text: str) -> Any:
    try:
        return read_json(text, nan=True, big=True)
    except ValueError:
        return {}


# ---- renaming, tagging, deleting -----------------------------------------------------------------
# Renames, tags and deletes runs of the run store by their keys.
#
# Every function raises StoreError if the file is missing or has a newer version, and sqlite3.Error.


_WAIT_S = 5.0


def rename(path: Path, run: int, name: str | None) -> None:
    """Name the run; None removes its name. Raises sqlite3.IntegrityError if another run has the name."""
    with _changing(path) as connection:
        connection.execute("UPDATE runs SET name = ? WHERE key = ?", (name, run))


def set_tags(path: Path, run: int, tags: Iterable[str]) -> None:
    """Replace the tags of the run. A tag has no spaces."""
    with _changing(path) as connection:
        connection.execute("UPDATE runs SET tags = ? WHERE key = ?", (" ".join(tags), run))


def remove(path: Path, runs: Iterable[int]) -> None:
    """Delete the runs with all their rows, and return the free pages to the disk."""
    with _changing(path) as connection:
        for run in runs:
            for table in OF_A_RUN:
                connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
            connection.execute("DELETE FROM runs WHERE key = ?", (run,))
    with closing(open_to_write(path, _WAIT_S)) as connection:
        connection.execute("PRAGMA incremental_vacuum").fetchall()


@contextmanager
def _changing(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file and run the block as one transaction."""
    with closing(open_to_write(path, _WAIT_S)) as connection, connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
