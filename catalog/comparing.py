"""Runs on record side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from ..common.config.conditions import Condition, condition
from ..common.config.sections.launching import CostConfig
from ..common.errors import UsageError
from ..common.reporting.compared import write_report
from ..common.reporting.curve import Point, add_trained
from ..common.reporting.findings import findings
from ..common.reporting.report import comparison_table, report_console
from ..common.reporting.summary import Cost, Summary
from ..common.runstore.reading import RunStore, StoredRun, config_differences
from .showing import plain, print_json

# What differs between any two runs, or says nothing of how they trained.
_NOT_HOW = ("output.", "log.", "launch.", "server.listen", "checkpoint.dir", "server.metrics", "worker.rank")
_SEED = "run.seed"
_MOST_IN_A_LABEL = 2


def compare(path: Path, told: Sequence[str], report: str | None, wanted: str | None, *, as_json: bool) -> None:
    """The table, sentences, and the differences; of runs that differ only in their seed, one name. `report`: the folder
    for one; `wanted`: what is to be reached."""
    target = _target(wanted)
    with RunStore(path) as store:
        runs = list({run.key: run for run in map(store.find, told)}.values())
        if len(runs) < 2:
            raise UsageError("one run is compared with another", fix="ps-runs compare A B; ps-runs list names them")
        found = [store.summary(run) or so_far(store, run) for run in runs]
        for run, summary in zip(runs, found, strict=True):
            summary.trained = trained(store, run)
        differs = {
            key: values for key, values in config_differences(store.config(run) for run in runs).items()
            if not key.startswith(_NOT_HOW)
        }  # fmt: skip
    labels = labels_of(runs, differs)
    named, notes = list(zip(labels, found, strict=True)), notes_on(runs)
    said = findings(named, target) if len({run.work for run in runs}) == 1 else []
    if as_json:
        print_json({
            "runs": [{"run": run.model_dump(), "label": label, "summary": item.model_dump()}
                     for run, (label, item) in zip(runs, named, strict=True)],
            "differences": differs, "findings": said, "notes": notes,
        })  # fmt: skip
    else:
        _show(named, target, differs, [*said, *notes])
    if report is not None:
        title = ", ".join(dict.fromkeys(run.work for run in runs))
        write_report(report, title, named, notes, differs, target=target)
        if not as_json:
            print(f"the report is {report}/report.html")


def _target(told: str | None) -> Condition | None:
    try:
        return None if told is None else condition(told)
    except ValueError as error:
        raise UsageError(f"--target: {error}") from None


def trained(store: RunStore, run: StoredRun) -> list[Point]:
    """The training loss on its way."""
    points: list[Point] = []
    for row in store.series(run):
        add_trained(points, row)
    return points


def so_far(store: RunStore, run: StoredRun) -> Summary:
    """What a run that goes on, or ended without a word, has come to."""
    known = {
        **run.row(), "mode": run.mode, "wall_s": run.elapsed_s, "final": run.figures, "ended_by": run.ended_by,
        "curve": list(store.evaluations(run)), "workers": list(store.newest_workers(run)),
    }  # fmt: skip
    found = Summary(**known)
    with suppress(ValidationError):  # of another version
        prices = CostConfig.model_validate(store.config(run).get("cost", {}))
        if prices.rate is not None:
            found.cost = Cost.of(prices.currency, prices.rate, found.wall_s, found.wait_share, None)
    return found


def labels_of(runs: Sequence[StoredRun], differs: dict[str, list[Any]]) -> list[str]:
    """A run's name; of one without, its mode and what sets it apart from others of the mode. Those of which nothing but
    the seed differs have one label."""
    told = []
    for index, run in enumerate(runs):
        others = [place for place, other in enumerate(runs) if other.mode == run.mode and other.work == run.work]
        own = [
            f"{key.rpartition('.')[2]}={values[index]}" for key, values in differs.items()
            if key not in (_SEED, "run.mode") and any(values[place] != values[index] for place in others)
        ]  # fmt: skip
        of_work = f" {run.work}" if len({run.work for run in runs}) > 1 else ""
        apart = f" {', '.join(own)}" if len(own) <= _MOST_IN_A_LABEL else f" {run.id[:6]}"
        told.append(run.name or f"{run.mode}{of_work}{apart if own else ''}")
    return told


def notes_on(runs: Sequence[StoredRun]) -> list[str]:
    """What speaks against comparing them."""
    notes = []
    works, models = {run.work for run in runs}, {run.model for run in runs if run.model}
    if len(works) > 1:
        notes.append(f"The runs are of different tasks ({', '.join(sorted(works))}): losses and accuracies of one say "
                     "nothing about the other's; times, waits and traffic are shown.")  # fmt: skip
    elif len(models) > 1:
        notes.append("The runs train different models: their figures are those of each model.")
    for run in runs:
        if run.state in ("running", "lost"):
            how = "goes on" if run.state == "running" else "ended without a word"
            notes.append(f"{run.label} {how}: its figures are those of step {run.step:,}.")
    return notes


def _show(
    runs: list[tuple[str, Summary]], target: Condition | None, differs: dict[str, list[Any]], said: list[str]
) -> None:
    console = report_console()
    console.print(comparison_table([(escape(plain(label)), summary) for label, summary in runs], target))
    if differs:
        columns = (Column(Text(plain(label))) for label, _ in runs)
        table = Table("setting", *columns, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for key, values in differs.items():
            table.add_row(Text(plain(key)), *(Text(plain(str(value))) for value in values))
        console.print()
        console.print(table)
    for text in said:
        console.print(Text(plain(text), style="dim"))
