"""How long a round waits where its deadline follows what workers take: median + k MAD (`policy.straggler_mad`).

The median and the median absolute deviation do not move with a few stragglers, however slow they are (Leys et al.
2013, doi:10.1016/j.jesp.2013.03.013); 1.4826 MAD is a normal distribution's standard deviation. Late contributions
count with what they really took, so that a deadline does not draw in behind those who meet it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

_KEPT_ROUNDS = 8  # of contributions, each live worker's
_LEAST_SHARE = 0.1  # of the median: workers that are all as fast are not cut off by a hair


@dataclass(slots=True)
class Deadline:
    """Seconds from the begin of a round until it closes without those who are missing."""

    factor: float  # MADs (times 1.4826) beyond the median
    began: dict[int, float] = field(default_factory=dict)  # when each rank was told to compute
    durations: list[float] = field(default_factory=list)  # of the newest contributions, seconds, the newest last
    round_began: float = 0.0

    def begins(self, ranks: Iterable[int], now: float) -> None:
        """A round, for these ranks."""
        self.round_began = now
        self.began.update(dict.fromkeys(ranks, now))

    def took(self, rank: int, now: float, num_live: int, counts: bool) -> None:
        """A contribution has come, on time or late; a worker's first counts for nothing, of which the begin is not
        known. The next one begins now, or with the next round."""
        if counts:
            self.durations.append(now - self.began[rank])
        del self.durations[: max(0, len(self.durations) - _KEPT_ROUNDS * num_live)]
        self.began[rank] = now

    def after_s(self, num_live: int) -> float | None:
        """How long the open round waits from its begin; None while each worker has not contributed twice."""
        if len(self.durations) < 2 * num_live:
            return None
        middle = median(self.durations)
        deviation = 1.4826 * median(abs(duration - middle) for duration in self.durations)
        return middle + max(self.factor * deviation, _LEAST_SHARE * middle)
