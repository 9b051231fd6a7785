"""The comparison of runs: its columns, values and best values, for the terminal, Markdown and the page. Pure.

Runs with the same name differ only in their seed. Their value is a mean with its range, and unknown if a run lacks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel

from ..config.conditions import Condition
from .curve import TRAINED
from .metrics import OF_RUN, Display, shown_of_run
from .pictures.words import short_number
from .summary import Summary, price

Runs = Sequence[tuple[str, Summary]]

# Whether higher values of a run's metric are better. The metrics that are absent have no better direction.
IS_UP = {
    "loss": False, "elapsed_s": False, "samples_per_s": True, "wait_share": False, "num_bytes": False,
    "staleness_mean": False, "staleness_max": False, "wall_s": False, "union_steps_per_s": True,
    "bytes_per_worker": False, "peer_bytes": False,
}  # fmt: skip


class Measure(NamedTuple):
    """A column of a comparison: its name, a function that gets the value of a run or None, and one that formats it."""

    name: str
    get: Callable[[Summary], float | None]
    write: Callable[[float], str]
    key: str = ""  # the metric's name; for an evaluation `eval.NAME`
    is_up: bool | None = None  # whether more is better; None: neither is
    help: str = ""

    def text(self, run: Summary) -> str:
        """The value of one run; `-` if it is unknown."""
        value = self.get(run)
        return "-" if value is None else self.write(value)


class Spread(NamedTuple):
    """Mean and range of one metric over all runs with the same name."""

    mean: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high

    def cell(self, write: Callable[[float], str], is_best: bool = False) -> Cell:
        low, high = write(self.low), write(self.high)
        low, high = ("", "") if low == high else (low, high)
        return Cell(text=write(self.mean), low=low, high=high, is_best=is_best)


class Cell(BaseModel):
    text: str  # `-`: unknown
    low: str = ""  # of runs with the same name, where it is not `high`
    high: str = ""
    is_best: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.low} to {self.high})" if self.low else self.text


class Column(BaseModel):
    label: str
    help: str


class Row(BaseModel):
    label: str
    cells: list[Cell]
    members: list[list[str]]  # cells of each run
    note: str = ""  # why it is not ranked: what follows its name in a sentence


class Results(BaseModel):
    """A comparison as the page shows it."""

    columns: list[Column]
    rows: list[Row]  # the best first


def spreads(runs: Runs, get: Callable[[Summary], float | None]) -> dict[str, Spread]:
    """Returns the spread of a metric by name, in the order of the runs, without names of which a run lacks it."""
    values: dict[str, list[float]] = {}
    for name, run in runs:
        value = get(run)
        values.setdefault(name, []).append(math.nan if value is None else value)
    found = {name: each for name, each in values.items() if all(map(math.isfinite, each))}
    return {name: Spread(fmean(each), min(each), max(each)) for name, each in found.items()}


def deciding_metric(runs: Runs) -> str:
    """Returns the metric that compares the runs: accuracy if all have it, else loss, else the first common metric.

    If they have none in common, one that some have; of runs without evaluations the training loss.
    """
    known = dict.fromkeys(name for _, run in runs for name in run.final if is_up_in(runs, name) is not None)
    common = [name for name in known if all(name in run.final for _, run in runs)]
    for names in ([name for name in common if name != TRAINED], [*known]):
        if found := next((name for name in ("accuracy", "loss", *names) if name in names), ""):
            return found
    return ""


def is_up_in(runs: Runs, metric: str) -> bool | None:
    """Returns whether more is better in all runs; None if they disagree or the direction is not known."""
    found = {up for _, run in runs if (up := run.is_up(metric)) is not None}
    return found.pop() if len(found) == 1 else None


def unranked(runs: Runs) -> dict[str, str]:
    """Returns the names that are never the best, with the reason as a predicate: a run diverged, or lacks a value."""
    decides, found = deciding_metric(runs), dict[str, str]()
    for name in dict.fromkeys(name for name, _ in runs):
        same = [run.final for label, run in runs if label == name]
        for metric in dict.fromkeys([*filter(None, [decides]), *(key for final in same for key in final)]):
            values = [final.get(metric) for final in same]
            num = sum(value is None or not math.isfinite(value) for value in values)
            where = f" in {num} of {len(same)} runs" if len(same) > 1 else ""
            if any(value is not None and not math.isfinite(value) for value in values):
                found.setdefault(name, f"diverged: {metric} at the end is not finite{where}")
            elif num:
                found.setdefault(name, f"has no {metric} at the end{where}, so it is not ranked")
    return found


def alike(runs: Runs) -> Runs:
    """Returns the runs with rates of one definition: of the whole run, unless all know their steady part."""
    if all(run.steady_s > 0 for _, run in runs):
        return runs
    return [(name, run.model_copy(update={"steady_s": 0.0})) for name, run in runs]


def compare(runs: Runs, target: Condition | None = None, *, same_task: bool = True) -> Results:
    """Returns the results of the runs. Metrics of different tasks have no best value."""
    runs = alike(runs)
    columns, lost = comparison_columns(runs, target), unranked(runs) if same_task else {}
    names = list(dict.fromkeys(name for name, _ in runs))
    found = [spreads(runs, column.get) for column in columns]
    best = [
        best_of({name: item for name, item in of.items() if name not in lost}, column.is_up)
        if same_task or (column.key != "target" and not column.key.startswith("eval.")) else None
        for column, of in zip(columns, found, strict=True)
    ]  # fmt: skip
    rows = []
    for name in names:
        members = [[column.text(run) for column in columns] for label, run in runs if label == name]
        # A single value is shown although it is not finite.
        unknown = members[0] if len(members) == 1 else ["-"] * len(columns)
        cells = [of[name].cell(column.write, name == first) if name in of else Cell(text=text)
                 for column, of, first, text in zip(columns, found, best, unknown, strict=True)]  # fmt: skip
        rows.append(Row(label=name, cells=cells, members=members, note=lost.get(name, "")))
    order = _order(columns, found, same_task)
    rows.sort(key=lambda row: (row.label in lost, order.get(row.label, len(order))))
    return Results(columns=[Column(label=column.name, help=column.help) for column in columns], rows=rows)


def best_of(found: dict[str, Spread], is_up: bool | None) -> str | None:
    """Returns the name with the best value; None if its range overlaps another, or there is nothing to compare."""
    if is_up is None or len(found) < 2:
        return None
    name = (max if is_up else min)(found, key=lambda name: found[name].mean)
    return None if any(found[name].overlaps(item) for other, item in found.items() if other != name) else name


def _order(columns: Sequence[Measure], found: Sequence[dict[str, Spread]], same_task: bool) -> dict[str, int]:
    """Returns the rank of each name: by the evaluations where they can be compared, else by time."""
    of = {column.key: (column.is_up, item) for column, item in zip(columns, found, strict=True)
          if column.is_up is not None and len(item) > 1}  # fmt: skip
    evaluated = [key for key in of if key.startswith("eval.")] if same_task else []
    wanted = [key for key in ("eval.accuracy", "eval.loss") if key in evaluated] + evaluated + ["wall_s"]
    is_up, item = next((of[key] for key in wanted if key in of), (False, {}))
    ranked = sorted(item, key=lambda name: item[name].mean, reverse=bool(is_up))
    return {name: at for at, name in enumerate(ranked)}


def comparison_cells(runs: Runs, target: Condition | None = None) -> tuple[list[str], list[list[str]]]:
    """Returns the column names and rows as text. Runs with the same name get an extra row with mean and range."""
    results = compare(runs, target)
    of = {row.label: row for row in results.rows}
    members = {label: iter(row.members) for label, row in of.items()}
    rows = [[label, *next(members[label])] for label, _ in runs]
    for label in dict.fromkeys(label for label, _ in runs):
        if (num := len(of[label].members)) > 1:
            rows.append([f"{label}: mean of {num}", *map(str, of[label].cells)])
    return ["mode", *(column.label for column in results.columns)], rows


def comparison_columns(runs: Runs, target: Condition | None) -> list[Measure]:
    """The columns of a comparison: final metrics, the target, metrics of the run, costs in each currency."""
    finals = list(dict.fromkeys(name for _, run in runs for name in run.final))
    columns = [Measure(name, partial(_final, name), short_number, f"eval.{name}", is_up_in(runs, name),
                       "Final value, or that of the newest evaluation.") for name in finals]  # fmt: skip
    if target is not None:
        columns.append(Measure(f"s to {target}", lambda run: run.seconds_to(target), OF_RUN["wall_s"].text, "target",
                               False, "Seconds of training until then."))  # fmt: skip
    columns += [
        Measure(metric.label, attrgetter(metric.name), metric.text, metric.name, IS_UP.get(metric.name), metric.help)
        for metric in shown_of_run(Display.REPORT)
        if not metric.is_rare or any(getattr(run, metric.name) for _, run in runs)
    ]
    currencies = list(dict.fromkeys(run.cost.currency for _, run in runs if run.cost is not None))
    for currency in currencies:
        way, suffix = (False, "") if len(currencies) == 1 else (None, f", {currency}")
        total, waiting = (partial(_cost, currency, part) for part in ("total", "waiting"))
        columns.append(Measure(f"cost{suffix}", total, partial(_priced, currency), "cost", way))
        columns.append(Measure(f"for waiting{suffix}", waiting, price, "waiting_cost", way))
    return columns


def _final(name: str, run: Summary) -> float | None:
    return run.final.get(name)


def _cost(currency: str, part: str, run: Summary) -> float | None:
    return getattr(run.cost, part) if run.cost is not None and run.cost.currency == currency else None


def _priced(currency: str, total: float) -> str:
    return f"{price(total)} {currency}"
