"""Compares runs of the run store: a table, findings, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from ..common.config.conditions import Condition, condition
from ..common.errors import UsageError, plain
from ..common.reporting.comparison import findings
from ..common.reporting.curve import add_trained
from ..common.reporting.report import comparison_table, report_console
from ..common.reporting.summary import Summary
from ..common.runstore.reading import IRRELEVANT_SETTINGS, RunStore, StoredRun, config_differences
from ..web.stored import summary_of, view_of, write_report
from .showing import print_json

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
