"""When ps-launch doctor has measured enough: metrics agree, or its time is over. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median

_LAST, _WITHIN = 3, 0.05  # rounds that have to agree, by how much


class Rounds:
    """Rounds of the same measurements, one after another. `most_s`: from the first moment on."""

    def __init__(self, began_at: float, most_s: float) -> None:
        self._until, self._most_s = began_at + most_s, most_s
        self._metrics: list[Mapping[Hashable, float]] = []

    @property
    def num(self) -> int:
        return len(self._metrics)

    def add(self, metrics: Mapping[Hashable, float]) -> None:
        """A round is over: what was measured in it, by what it is of."""
        self._metrics.append(metrics)

    def differ_by(self) -> float:
        """How far the last three rounds are apart, or what the medians of all rounds were after each of them, as a part
        of the middle one, for the metric where that is most; the smaller of the two. inf: too few rounds."""
        if self.num < _LAST:
            return float("inf")
        medians = [
            {
                name: median(metric[name] for metric in self._metrics[:end] if name in metric)
                for name in self._metrics[-1]
            }
            for end in range(self.num - _LAST + 1, self.num + 1)
        ]
        return min(_spread(self._metrics[-_LAST:]), _spread(medians))

    def why_stop(self, now: float) -> str:
        """A sentence; empty: go on. The first round is always measured whole."""
        if not self._metrics:
            return ""
        rounds = f"{self.num} round{'s' if self.num > 1 else ''}"
        differ = self.differ_by()
        if differ <= _WITHIN:
            return f"{rounds}; the metrics of the last {_LAST} agree within {_WITHIN:.0%}"
        if now >= self._until:
            message = f", which differ by up to {differ:.0%}" if self.num >= _LAST else ""
            return f"{rounds}{message}: the {self._most_s:g} s of --budget were used up"
        return ""

    def part_done(self, now: float) -> float:
        """Of the time that may be used, 0..1."""
        return min(1.0, 1.0 - (self._until - now) / self._most_s)


def _spread(rounds: Sequence[Mapping[Hashable, float]]) -> float:
    """The largest difference of a metric in three rounds, as a part of the middle one."""
    spreads = []
    for name in set(rounds[0]).intersection(*rounds):
        low, middle, high = sorted(item[name] for item in rounds)
        spreads.append((high - low) / middle if middle else 0.0)
    return max(spreads, default=0.0)
