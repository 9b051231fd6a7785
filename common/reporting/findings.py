"""The findings of a comparison of runs, as sentences made from their metrics. Pure.

Runs with the same name differ only in their seed: a finding uses the mean and range of their metrics. If two ranges
overlap, the findings call neither better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from ..config.conditions import Condition
from .comparison import IS_UP, Runs, Spread, alike, deciding_metric, is_up_in, spreads, unranked
from .curve import TRAINED
from .metrics import OF_RUN
from .pictures.words import short_number
from .summary import price

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
