"""What a comparison of runs says, in sentences that follow from their figures. Pure.

Runs of one name are one way of training with several seeds: their figures are a mean, and the range that they span.
Where two ranges overlap nothing is said to be better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from .curve import is_up
from .report import figure, share, size
from .summary import Summary

Runs = Sequence[tuple[str, Summary]]


class Spread(NamedTuple):
    """Of one figure, of all runs of one name."""

    mean: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        return self.low <= other.high and other.low <= self.high

    def told(self, write: Callable[[float], str]) -> str:
        return (
            write(self.mean)
            if self.low == self.high
            else f"{write(self.mean)} ({write(self.low)} to {write(self.high)})"
        )


class Target(NamedTuple):
    """A value of a figure that every run has reached: the worst of their best."""

    figure: str
    value: float

    def reached(self, run: Summary) -> tuple[float, int]:
        """Seconds and steps until then."""
        for point in run.curve:
            value = point.figures.get(self.figure)
            if value is not None and (value >= self.value if is_up(self.figure) else value <= self.value):
                return point.elapsed_s, point.step
        raise ValueError(f"{run.mode} has not reached {self.figure} {self.value}")


def spreads(runs: Runs, get: Callable[[Summary], float]) -> dict[str, Spread]:
    """By name, in the order of the runs."""
    values: dict[str, list[float]] = {}
    for name, run in runs:
        values.setdefault(name, []).append(get(run))
    return {name: Spread(fmean(each), min(each), max(each)) for name, each in values.items()}


def deciding_figure(runs: Runs) -> str:
    """The one by which runs are compared: accuracy where all have one, else loss, else the first that all have."""
    common = [name for name in runs[0][1].final if all(name in run.final for _, run in runs)] if runs else []
    return next((name for name in ("accuracy", "loss", *common) if name in common), "")


def target_of(runs: Runs) -> Target | None:
    """None where a run was not evaluated on its way."""
    decides, bests = deciding_figure(runs), []
    for _, run in runs:
        values = [value for _, _, value in points_of(run, decides) if math.isfinite(value)]
        if len(values) < 2:
            return None
        bests.append(max(values) if is_up(decides) else min(values))
    if not bests:
        return None
    return Target(decides, min(bests) if is_up(decides) else max(bests))


def findings(runs: Runs) -> list[str]:
    """What won, by how much, and what it cost."""
    names = list(dict.fromkeys(name for name, _ in runs))
    if len(names) < 2:
        return []
    told = []
    if decides := deciding_figure(runs):
        ended = spreads(runs, lambda run: run.final[decides])
        lost = [name for name, spread in ended.items() if not math.isfinite(spread.mean)]
        sound = {name: spread for name, spread in ended.items() if name not in lost}
        if len(sound) > 1:
            told.append(_best(f"{decides} at the end", sound, is_up(decides), figure))
        if lost:
            told.append(f"{', '.join(lost)} diverged: {decides} at the end is not finite.")
    if (target := target_of(runs)) is not None:
        what = f"seconds to {target.figure} {figure(target.value)}, which every run reached"
        told.append(_best(what, spreads(runs, lambda run: target.reached(run)[0]), False, _seconds))
    told.append(_best("seconds in all", spreads(runs, lambda run: run.wall_s), False, _seconds))
    told.append(_range("Waiting, of the workers' time", spreads(runs, lambda run: run.wait_share), share))
    told.append(_range("Staleness, mean", spreads(runs, lambda run: run.staleness_mean), lambda value: f"{value:.2f}"))
    told.append(_range("Traffic", spreads(runs, lambda run: run.num_bytes), lambda value: size(int(value))))
    return [one for one in told if one]


def _best(what: str, of: dict[str, Spread], is_more_better: bool, write: Callable[[float], str]) -> str:
    ranked = sorted(of, key=lambda name: of[name].mean, reverse=is_more_better)
    first, others = ranked[0], ranked[1:]
    equal = [name for name in others if of[name].overlaps(of[first])]
    rest = ", ".join(f"{name} {of[name].told(write)}" for name in others)
    if len(equal) == len(others):
        return f"{what.capitalize()}: no difference beyond the spread; {first} {of[first].told(write)}, {rest}."
    but = f" (not beyond the spread of {', '.join(equal)})" if equal else ""
    return f"{what.capitalize()}: {first} is best{but} with {of[first].told(write)}; {rest}."


def _range(what: str, of: dict[str, Spread], write: Callable[[float], str]) -> str:
    """The ends; empty where all are equal."""
    most, least = max(of, key=lambda name: of[name].mean), min(of, key=lambda name: of[name].mean)
    if of[most].mean == of[least].mean:
        return ""
    times = f", {of[most].mean / of[least].mean:.1f} times as much" if of[least].mean > 0 else ""
    return f"{what}: least in {least}, {write(of[least].mean)}; most in {most}, {write(of[most].mean)}{times}."


def points_of(run: Summary, name: str) -> list[tuple[float, int, float]]:
    """Seconds, steps and value of each evaluation that has this figure."""
    return [(point.elapsed_s, point.step, point.figures[name]) for point in run.curve if name in point.figures]


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"
