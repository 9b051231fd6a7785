"""A round's deadline that follows the workers' durations: median + k MAD (`policy.straggler_mad`).

The median and the median absolute deviation do not move with a few stragglers, however slow they are (Leys et al.
2013, doi:10.1016/j.jesp.2013.03.013); 1.4826 MAD is a normal distribution's standard deviation. Late contributions
count with their real duration, so that a deadline does not shrink towards the workers that meet it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_KEPT_ROUNDS = 8  # of contributions, each live worker's
_LEAST_SHARE = 0.1  # of the median: workers that are all as fast are not cut off by a hair


@dataclass(slots=True)
class Deadline:
    """The deadline of missing workers: seconds after a worker's last reply."""

    factor: float  # MADs (times 1.4826) beyond the median
    began: dict[int, float] = field(default_factory=dict)  # the time at which each live rank began to compute
    durations: list[float] = field(default_factory=list)  # of the newest contributions, seconds, the newest last
    after_s: float | None = None  # in the open round; None: it waits for everybody
    round_began: float = 0.0

    def begins(self, ranks: Iterable[int], num_live: int, now: float) -> None:
        """Begin a round for these ranks, which contributed to the one before. It has no deadline while workers have not
        contributed twice each."""
        self.round_began = now
        self.began.update(dict.fromkeys(ranks, now))
        del self.durations[: max(0, len(self.durations) - _KEPT_ROUNDS * num_live)]
        self.after_s = None
        if len(self.durations) >= 2 * max(1, num_live):
            middle = median(self.durations)
            deviation = 1.4826 * median(abs(duration - middle) for duration in self.durations)
            self.after_s = middle + max(self.factor * deviation, _LEAST_SHARE * middle)

    def took(self, rank: int, now: float, counts: bool) -> None:
        """Note the duration of a contribution, on time or late. A worker's first is ignored: the worker may have waited
        for others to join, or compiled. The next one begins now, or with the next round."""
        if counts:
            self.durations.append(now - self.began[rank])
        self.began[rank] = now

    def saved(self) -> dict[str, Any]:
        """Returns the JSON that a snapshot keeps for workers that join again."""
        return {"durations": list(self.durations), "after_s": self.after_s}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.durations, self.after_s = list(saved.get("durations", ())), saved.get("after_s")

    def has_passed(self, missing: Iterable[int], now: float) -> bool:
        """Whether the deadline of all these ranks has passed. Checks each rank only where that is possible."""
        if self.after_s is None or now - self.round_began < self.after_s:
            return False
        return all(now - self.began[rank] >= self.after_s for rank in missing)
