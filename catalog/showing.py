"""Lists runs, shows one, and changes what is on record of one."""

from __future__ import annotations

import csv
import io
import sqlite3
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from ..common.errors import OutputError, UsageError
from ..common.reporting.metrics import Display, shown_of_run
from ..common.reporting.report import duration, figure, report_console, summary_table
from ..common.runstore.changing import remove, rename
from ..common.runstore.reading import RunStore, StoredRun
from ..common.wire.json_text import to_json

_STYLES = {"running": "green", "lost": "red", "stopped": "yellow"}
_STATES = {"lost": "ended without a word"}
_MOST_EVENTS = 12
_MOST_LISTED = 50  # rich takes a second to lay out a thousand


def list_runs(path: Path, most: int | None, *, as_json: bool) -> None:
    with RunStore(path) as store:
        runs = store.runs(most if most or as_json else _MOST_LISTED + 1)
    if as_json:
        print_json([run.model_dump() for run in runs])
        return
    is_cut = most is None and len(runs) > _MOST_LISTED
    runs = runs[:_MOST_LISTED] if is_cut else runs
    figures = list(dict.fromkeys(name for run in runs for name in run.figures))[:3]
    names = ["run", "started", "state", "work", "mode"]
    table = Table(*names, *(Column(name, justify="right") for name in ["steps", "took", *figures]), box=None,
                  header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))  # fmt: skip
    for run in runs:
        steps = f"{run.step:,}/{run.steps:,}" if run.steps and run.step != run.steps else f"{run.step:,}"
        shown = [figure(run.figures[name]) if name in run.figures else "-" for name in figures]
        state = Text(_STATES.get(run.state, run.state), style=_STYLES.get(run.state, ""))
        name, work, mode = (Text(plain(item)) for item in (run.name or run.id, run.work, run.mode))
        table.add_row(name, when(run.started_at), state, work, mode, steps, duration(run.elapsed_s), *shown)
    console = report_console()
    console.print(table if runs else "no run is on record yet")
    if is_cut:
        console.print(Text(f"the newest {_MOST_LISTED}; -n 1000 shows more", style="dim"))


def show_run(path: Path, told: str, *, as_json: bool) -> None:
    with RunStore(path) as store:
        run = store.find(told)
        if as_json:
            print_json(everything(store, run))
            return
        summary, events = store.summary(run), store.events(run)
        machine, code, evaluations = store.machine(run), store.code(run), store.evaluations(run)
        snapshots = store.snapshots(run)
    console = report_console()
    state = _STATES.get(run.state, run.state)
    console.print(Text(plain(f"{run.label}   {run.id}   {run.work}, {run.mode}   {state}"), style="bold"))
    where = ", ".join(f"{name} {value}" for name, value in {**code, **machine}.items() if value)
    starts = f", {run.starts} starts of its server" if run.starts > 1 else ""
    console.print(Text(plain(f"started {when(run.started_at)}{starts}; {where}"), style="dim"))
    if summary is not None:
        console.print(summary_table(summary.model_copy(update={"mode": plain(summary.mode)})))
    else:
        values = [f"{metric.label} {metric.text(getattr(run, metric.name))}" for metric in shown_of_run(Display.STATUS)]
        console.print(Text(plain("   ".join(values))))
        if run.state != "running":
            console.print(Text(f"last heard of {when(run.heard_at)}"))
    if run.ended_by:
        console.print(Text(plain(run.ended_by), style="yellow"))
    for point in evaluations[-5:]:
        figures = "   ".join(f"{name} {figure(value)}" for name, value in point.figures.items())
        console.print(Text(plain(f"evaluated at step {point.step:,}: {figures}")))
    if snapshots:
        console.print(Text(plain(f"{len(snapshots)} snapshots, the newest {snapshots[-1].path}")))
    for event in events[-_MOST_EVENTS:]:
        rank = "" if event.rank is None else f" rank {event.rank}"
        fields = " ".join(f"{name}={value}" for name, value in event.fields.items() if not isinstance(value, dict))
        console.print(Text(plain(f"{when(event.at)}  {event.kind}{rank}  {fields}"), style="dim"))


def export(path: Path, told: str, out: Path | None, *, as_json: bool) -> None:
    with RunStore(path) as store:
        run = store.find(told)
        if as_json or (out is not None and out.suffix == ".json"):
            text = to_json(everything(store, run), indent=2) + "\n"
        else:
            lines = io.StringIO()
            rows = [point.model_dump() for point in store.series(run)]
            writer = csv.DictWriter(lines, list(rows[0]) if rows else [], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            text = lines.getvalue()
    write(text.encode(), out)


def everything(store: RunStore, run: StoredRun) -> dict[str, Any]:
    """All that is on record of a run."""
    summary = store.summary(run)
    return {
        "run": run.model_dump(), "summary": summary.model_dump() if summary else None, "config": store.config(run),
        "code": store.code(run), "machine": store.machine(run),
        "evaluations": [point.model_dump() for point in store.evaluations(run)],
        "snapshots": [snapshot.model_dump() for snapshot in store.snapshots(run)],
        "events": [event.model_dump() for event in store.events(run)],
        "series": [point.model_dump() for point in store.series(run)],
        "worker_series": [point.model_dump() for point in store.worker_series(run)],
    }  # fmt: skip


def tag(path: Path, told: str, name: str, *, as_json: bool) -> None:
    with RunStore(path) as store:
        run = store.find(told)
    if name == "last" or len(name) > 100 or name != plain(name):
        raise UsageError(f"a run cannot be called {plain(name)[:100]!r}",
                         fix="up to 100 characters that can be printed; `last` is the newest")  # fmt: skip
    try:
        rename(path, run.key, name or None)
    except sqlite3.IntegrityError:
        raise UsageError(
            f"another run is called {name}", fix="take that name away first: ps-runs tag NAME ''"
        ) from None
    except sqlite3.Error as error:
        raise _unchanged(path, error) from None
    _say({"id": run.id, "name": name or None}, f"{run.id} is {name or 'without a name'}", as_json=as_json)


def delete(path: Path, told: list[str], *, force: bool, as_json: bool) -> None:
    with RunStore(path) as store:
        runs = {run.key: run for run in map(store.find, told)}
    for run in runs.values():
        if run.state == "running" and not force:
            raise UsageError(f"run {run.label} goes on", fix="end it first, or --force")
    try:
        remove(path, runs)
    except sqlite3.Error as error:
        raise _unchanged(path, error) from None
    ids = [run.id for run in runs.values()]
    _say({"deleted": ids}, f"forgotten: {', '.join(ids)}", as_json=as_json)


def _unchanged(path: Path, error: sqlite3.Error) -> OutputError:
    return OutputError(f"{path} cannot be changed: {error}", fix="who has it open? is the folder yours to write?")


def _say(fields: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(fields)
    else:
        print(text)


# ---- shared by the commands --------------------------------------------------------------------------


def plain(text: str) -> str:
    """On a terminal; what a name holds beyond letters is not carried out."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def when(at: float) -> str:
    then = datetime.fromtimestamp(at)
    return then.strftime("%H:%M:%S" if time.time() - at < 86_400 else "%Y-%m-%d %H:%M")


def print_json(value: Any) -> None:
    print(to_json(value, indent=2))


def write(data: bytes, out: Path | None) -> None:
    """To a file, or to standard output."""
    if out is None:
        sys.stdout.write(data.decode())
        return
    try:
        out.write_bytes(data)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from None
