"""The numbers of a run from those of its ranks: the only place where they are added up. Pure.

| a metric says (`Tense`) | it folds over |
|---|---|
| what was done: samples, bytes, contributions | all ranks, also those that are gone |
| what is done now: rates, CPU, the shares of recent time | live ranks that still train |
| what was seen last: losses, learning rates, what scripts record | those; when none is left, those that were last |

The ranks that were last are those that left in good order; if all were lost, the one that contributed last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from .metrics import OF_WORKER, Fold, Metric, Tense, Value, total_or_unknown


class Presence(NamedTuple):
    """Whether a rank takes part now. `is_live`: it trains and has not finished; `last_at`: of its contributions."""

    is_live: bool = True
    is_lost: bool = False  # it left, and not in good order
    last_at: float = 0.0


class Present(Protocol):
    @property
    def presence(self) -> Presence: ...

    @property
    def recorded(self) -> Any: ...


Rank = TypeVar("Rank", bound=Present)


def folded(ranks: Sequence[Rank], value: Callable[[Metric, Rank], Value]) -> dict[str, Value]:
    """Returns the metrics of the run that add up over ranks. `value` gives a metric of a rank."""
    over = {tense: taking_part(ranks, tense) for tense in Tense}
    return {
        metric.name: _FOLDED[metric.over_workers]([value(metric, rank) for rank in over[metric.tense]])
        for metric in OF_WORKER.values()
        if metric.over_workers in _FOLDED
    }


def mean_recorded(ranks: Sequence[Rank]) -> dict[str, float]:
    """Returns the mean of each metric that scripts record, over the ranks that have it."""
    values: dict[str, list[float]] = {}
    for rank in taking_part(ranks, Tense.LAST):
        for name, value in rank.recorded.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def with_mean_rate(row: Mapping[str, Value], wall_s: float) -> dict[str, Value]:
    """Returns the results of a rank with its rate over the whole run."""
    samples = row["samples"]
    return {**row, "samples_per_s": None if samples is None else round(samples / wall_s, 6) if wall_s > 0 else 0.0}


def taking_part(ranks: Sequence[Rank], tense: Tense) -> Sequence[Rank]:
    """Returns the ranks that a metric of this tense folds over."""
    if tense is Tense.DONE:
        return ranks
    live = [rank for rank in ranks if rank.presence.is_live]
    if live or tense is Tense.NOW:
        return live
    if left_well := [rank for rank in ranks if not rank.presence.is_lost]:
        return left_well
    newest = max((rank.presence.last_at for rank in ranks), default=0.0)
    return [rank for rank in ranks if rank.presence.last_at == newest]


def _mean(values: list[Value]) -> Value:
    """Returns the mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _maximum(values: list[Value]) -> Value:
    return max((value for value in values if value is not None), default=0)


_FOLDED: dict[Fold | None, Callable[[list[Value]], Value]] = {
    Fold.SUM: total_or_unknown, Fold.MEAN: _mean, Fold.MAX: _maximum,
}  # fmt: skip
