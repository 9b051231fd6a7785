"""The comparison of runs: its columns, values, best values and findings, for the terminal, Markdown and the page. Pure.

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
    of_curves = [key for key in of if key.startswith("eval.")] if same_task else []
    wanted = [key for key in ("eval.accuracy", "eval.loss") if key in of_curves] + of_curves + ["wall_s"]
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


# ---- findings ------------------------------------------------------------------------------------
# The findings of a comparison of runs, as sentences made from their metrics. Pure.
#
# Runs with the same name differ only in their seed: a finding uses the mean and range of their metrics. If two ranges
# overlap, the findings call neither better.


# Metrics whose minimum and maximum are reported, and their names in a sentence.
_RANGES = {
    "wait_share": "Waiting, of the workers' time", "staleness_mean": "Staleness, mean",
    "samples_per_s": "Samples a second", "union_steps_per_s": "Steps of the union batch a second",
    "num_bytes": "Traffic",
}  # fmt: skip
# Metrics that explain why a run is faster, and their names there.
_REASONS = {
    "wait_share": "waiting", "num_bytes": "sent and received",
    "union_steps_per_s": "steps of the union batch a second",
}  # fmt: skip


def target_of(runs: Runs) -> Condition | None:
    """Returns a target that every run reached: the worst of their best values.

    It uses the deciding metric if all runs were evaluated during training, and otherwise the training loss. Returns
    None if a run has neither.
    """
    for name in filter(None, (deciding_metric(runs), TRAINED)):
        values = [[v for point in run.points_of(name) if math.isfinite(v := point.metrics[name])] for _, run in runs]
        if values and min(map(len, values)) > 1:
            up = is_up_in(runs, name)
            return Condition(name, ">=", min(map(max, values))) if up else Condition(name, "<=", max(map(min, values)))
    return None


def findings(runs: Runs, target: Condition | None = None) -> list[str]:
    """Returns which run won, by how much, why, and its cost. The default target is `target_of(runs)`."""
    names = list(dict.fromkeys(name for name, _ in runs))
    if len(names) < 2:
        return []
    runs, lost = alike(runs), unranked(runs)
    sound = [(name, run) for name, run in runs if name not in lost]
    sentences, decides = [], deciding_metric(runs)
    if decides:
        ended = spreads(sound, lambda run: run.final.get(decides))
        sentences.append(_best(f"{decides} at the end", ended, is_up_in(runs, decides), short_number))
    sentences += [f"{name} {reason}." for name, reason in lost.items()]
    took = spreads(sound, lambda run: run.wall_s)
    if (wanted := target or target_of(runs)) is not None:
        about_target, reached = _to_target(sound, runs, wanted, is_told=target is not None)
        sentences += about_target
        took = reached if len(reached) > 1 else took
    sentences.append(_best("seconds in all", spreads(sound, lambda run: run.wall_s), False, _seconds))
    sentences.append(_why(sound, took, wanted))
    for name, words in _RANGES.items():
        found = spreads(runs, attrgetter(name))
        if len(found) == len(names):
            sentences.append(_range(words, found, OF_RUN[name].text))
    costs = [run.cost for _, run in runs if run.cost is not None]
    if len(costs) == len(runs) and len({cost.currency for cost in costs}) == 1:
        totals = spreads(runs, lambda run: run.cost.total if run.cost else 0.0)
        sentences.append(_range(f"Cost, {costs[0].currency}", totals, price))
    return [item for item in sentences if item]


def _to_target(sound: Runs, runs: Runs, target: Condition, *, is_told: bool) -> tuple[list[str], dict[str, Spread]]:
    """Returns sentences about which names reached the target and when, and the seconds by name."""
    missed = list(dict.fromkeys(name for name, run in runs if run.reached(target) is None))
    reaching = [(name, run) for name, run in sound if name not in missed]
    sentences = []
    reached = spreads(reaching, lambda run: run.seconds_to(target))
    goal = str(target) if is_told else f"{target.metric} {short_number(target.bound)}, which every run reached"
    if len(reached) > 1:
        sentences.append(_best(f"seconds to {goal}", reached, False, _seconds))
    elif reached:
        ((name, spread),) = reached.items()
        sentences.append(f"Only {name} reached {target}, after {spread.cell(_seconds)}.")
    if missed:
        sentences.append(f"{', '.join(missed)} did not reach {target}.")
    return sentences, reached


def _why(runs: Runs, took: dict[str, Spread], target: Condition | None) -> str:
    """Returns the reasons why the fastest beat the slowest; empty if no difference exceeds the spread."""
    if len(took) < 2:
        return ""
    first, last = (choose(took, key=lambda name: took[name].mean) for choose in (min, max))
    if took[first].overlaps(took[last]) or _seconds(took[first].mean) == _seconds(took[last].mean):
        return ""
    metrics = [(word, spreads(runs, attrgetter(key)), OF_RUN[key].text, IS_UP[key]) for key, word in _REASONS.items()]
    if target is not None:
        steps = spreads([(n, r) for n, r in runs if n in took], lambda run: p.step if (p := run.reached(target)) else 0)
        if min(spread.low for spread in steps.values()) > 0:
            metrics.append(("steps until then", steps, OF_RUN["step"].text, False))
    why = [
        f"{write(by_name[first].mean)} {words} instead of {write(by_name[last].mean)}"
        for words, by_name, write, is_more_better in metrics
        if not by_name[first].overlaps(by_name[last]) and (by_name[first].mean > by_name[last].mean) == is_more_better
        and write(by_name[first].mean) != write(by_name[last].mean)
    ]  # fmt: skip
    return f"{first} was faster than {last} with {', '.join(why)}." if why else ""


def _best(words: str, by_name: dict[str, Spread], is_up: bool | None, write: Callable[[float], str]) -> str:
    """Returns a sentence about the best; empty if there is nothing to compare, or all values are the same."""
    texts = {name: str(spread.cell(write)) for name, spread in by_name.items()}
    if len(by_name) < 2 or is_up is None or len(set(texts.values())) == 1:
        return ""
    words = words[:1].upper() + words[1:]  # names of metrics keep their case
    first, *others = sorted(by_name, key=lambda name: by_name[name].mean, reverse=is_up)
    equal = [name for name in others if by_name[name].overlaps(by_name[first])]
    rest = ", ".join(f"{name} {texts[name]}" for name in others)
    if len(equal) == len(others):
        return f"{words}: no difference beyond the spread; {first} {texts[first]}, {rest}."
    but = f" (not beyond the spread of {', '.join(equal)})" if equal else ""
    return f"{words}: {first} is best{but} with {texts[first]}; {rest}."


def _range(words: str, by_name: dict[str, Spread], write: Callable[[float], str]) -> str:
    """Returns a sentence with the minimum and maximum; empty if they overlap or are written alike."""
    most, least = max(by_name, key=lambda name: by_name[name].mean), min(by_name, key=lambda name: by_name[name].mean)
    low, high = by_name[least].mean, by_name[most].mean
    if by_name[most].overlaps(by_name[least]) or write(low) == write(high):
        return ""
    is_multiple = low > 0 and write(low) != write(0.0) and high / low >= 1.05
    times = f", {high / low:.1f} times as much" if is_multiple else ""
    return f"{words}: least in {least}, {write(low)}; most in {most}, {write(high)}{times}."


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"
