"""The findings of a comparison of runs, as sentences made from their metrics. Pure.

Runs with the same name differ only in their seed: a finding uses the mean and range of their metrics. If two ranges
overlap, the findings call neither better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from ..config.conditions import Condition
from .curve import TRAINED
from .metrics import OF_RUN
from .pictures.words import short_number
from .report import Spread
from .summary import Summary, price

Runs = Sequence[tuple[str, Summary]]

# Metrics whose minimum and maximum are reported, and their names in a sentence.
_RANGES = {
    "wait_share": "Waiting, of the workers' time", "staleness_mean": "Staleness, mean",
    "samples_per_s": "Samples a second", "union_steps_per_s": "Steps of the union batch a second",
    "num_bytes": "Traffic",
}  # fmt: skip
# Metrics that explain why a run is faster: name, words, whether more is better.
_REASONS = (
    ("wait_share", "waiting", False),
    ("num_bytes", "sent and received", False),
    ("union_steps_per_s", "steps of the union batch a second", True),
)


def spreads(runs: Runs, get: Callable[[Summary], float | None]) -> dict[str, Spread]:
    """Returns the spread of a metric by run name, in the order of the runs; runs without the metric are left out."""
    values: dict[str, list[float]] = {}
    for name, run in runs:
        if (value := get(run)) is not None:
            values.setdefault(name, []).append(value)
    return {name: Spread.of(each) for name, each in values.items()}


def deciding_metric(runs: Runs) -> str:
    """Returns the metric that compares the runs: accuracy if all have it, else loss, else the first common metric."""
    names = runs[0][1].final if runs else ()
    common = [name for name in names if all(name in run.final for _, run in runs) and is_up_in(runs, name) is not None]
    return next((name for name in ("accuracy", "loss", *common) if name in common), "")


def is_up_in(runs: Runs, metric: str) -> bool | None:
    """Returns whether more is better in all runs; None if they disagree, or nobody knows."""
    found = {up for _, run in runs if (up := run.is_up(metric)) is not None}
    return found.pop() if len(found) == 1 else None


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
    sentences = []
    if decides := deciding_metric(runs):
        ended = spreads(runs, lambda run: run.final[decides])
        lost = [name for name, spread in ended.items() if not math.isfinite(spread.mean)]
        sound = {name: spread for name, spread in ended.items() if name not in lost}
        if len(sound) > 1:
            sentences.append(_best(f"{decides} at the end", sound, bool(is_up_in(runs, decides)), short_number))
        if lost:
            sentences.append(f"{', '.join(lost)} diverged: {decides} at the end is not finite.")
    took = spreads(runs, lambda run: run.wall_s)
    if (wanted := target or target_of(runs)) is not None:
        about_target, reached = _to_target(runs, wanted, is_told=target is not None)
        sentences += about_target
        took = reached if len(reached) > 1 else took
    sentences.append(_best("seconds in all", spreads(runs, lambda run: run.wall_s), False, _seconds))
    sentences.append(_why(runs, took, wanted))
    for name, words in _RANGES.items():
        found = spreads(runs, attrgetter(name))
        if len(found) == len(names):
            sentences.append(_range(words, found, OF_RUN[name].text))
    if costs := _costs(runs):
        sentences.append(_range(f"Cost, {costs[0]}", costs[1], price))
    return [item for item in sentences if item]


def _to_target(runs: Runs, target: Condition, *, is_told: bool) -> tuple[list[str], dict[str, Spread]]:
    """Returns sentences about which names reached the target and when, and the seconds by name."""
    missed = list(dict.fromkeys(name for name, run in runs if run.reached(target) is None))
    reaching = [(name, run) for name, run in runs if name not in missed]
    sentences = []
    reached = spreads(reaching, lambda run: run.seconds_to(target))
    goal = str(target) if is_told else f"{target.metric} {short_number(target.bound)}, which every run reached"
    if len(reached) > 1:
        sentences.append(_best(f"seconds to {goal}", reached, False, _seconds))
    elif reached:
        ((name, spread),) = reached.items()
        sentences.append(f"Only {name} reached {target}, after {spread.text(_seconds)}.")
    if missed:
        sentences.append(f"{', '.join(missed)} did not reach {target}.")
    return sentences, reached


def _why(runs: Runs, took: dict[str, Spread], target: Condition | None) -> str:
    """Returns the reasons why the fastest beat the slowest; empty if no difference exceeds the spread."""
    first, last = (choose(took, key=lambda name: took[name].mean) for choose in (min, max))
    if took[first].overlaps(took[last]):
        return ""
    metrics = [(words, spreads(runs, attrgetter(name)), OF_RUN[name].text, is_up) for name, words, is_up in _REASONS]
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


def _costs(runs: Runs) -> tuple[str, dict[str, Spread]] | None:
    """Returns the currency and the costs by name; None unless all runs have costs in one currency."""
    paid = [run.cost for _, run in runs if run.cost is not None]
    if len(paid) < len(runs) or len({cost.currency for cost in paid}) != 1:
        return None
    return paid[0].currency, spreads(runs, lambda run: run.cost.total if run.cost else 0.0)


def _best(words: str, by_name: dict[str, Spread], is_more_better: bool, write: Callable[[float], str]) -> str:
    ranked = sorted(by_name, key=lambda name: by_name[name].mean, reverse=is_more_better)
    first, others = ranked[0], ranked[1:]
    equal = [name for name in others if by_name[name].overlaps(by_name[first])]
    rest = ", ".join(f"{name} {by_name[name].text(write)}" for name in others)
    if len(equal) == len(others):
        return f"{words.capitalize()}: no difference beyond the spread; {first} {by_name[first].text(write)}, {rest}."
    but = f" (not beyond the spread of {', '.join(equal)})" if equal else ""
    return f"{words.capitalize()}: {first} is best{but} with {by_name[first].text(write)}; {rest}."


def _range(words: str, by_name: dict[str, Spread], write: Callable[[float], str]) -> str:
    """Returns a sentence with the minimum and maximum; empty if all are equal."""
    most, least = max(by_name, key=lambda name: by_name[name].mean), min(by_name, key=lambda name: by_name[name].mean)
    if by_name[most].mean == by_name[least].mean:
        return ""
    low, high = by_name[least].mean, by_name[most].mean
    times = f", {high / low:.1f} times as much" if low > 0 else ""
    return f"{words}: least in {least}, {write(low)}; most in {most}, {write(high)}{times}."


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"
