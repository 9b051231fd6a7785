"""Decides when ps-launch doctor stops: rounds agree, or the time is over. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from statistics import median

_LAST, _TOLERANCE = 3, 0.05  # rounds that must agree, and how closely


class Rounds:
    """Rounds of the same measurements, in their order. `max_s`: time limit."""

    def __init__(self, began_at: float, max_s: float) -> None:
        self._until, self._max_s = began_at + max_s, max_s
        self._rounds: list[Mapping[Hashable, float]] = []

    @property
    def num(self) -> int:
        return len(self._rounds)

    def add(self, metrics: Mapping[Hashable, float]) -> None:
        """Add the measurements of a round, by worker and transport."""
        self._rounds.append(metrics)

    def differ_by(self, names: Collection[Hashable] | None = None) -> float:
        """Returns the smaller spread: of the last three rounds, or of the running medians after each of them.

        It is the largest relative spread of these measurements, or of all; inf for fewer rounds.
        """
        if self.num < _LAST:
            return float("inf")
        chosen = [name for name in self._rounds[-1] if names is None or name in names]
        if names and not chosen:
            return float("inf")
        medians = [
            {name: median(item[name] for item in self._rounds[:end] if name in item) for name in chosen}
            for end in range(self.num - _LAST + 1, self.num + 1)
        ]
        last = [{name: item[name] for name in chosen if name in item} for item in self._rounds[-_LAST:]]
        return min(_spread(last), _spread(medians))

    def why_stop(self, now: float, names: Collection[Hashable] | None = None) -> str:
        """Returns the reason to stop as a sentence, empty to continue. The first round is always complete.

        `names`: the measurements that must agree; None: all.
        """
        if not self._rounds:
            return ""
        rounds = f"{self.num} round{'s' if self.num > 1 else ''}"
        differ = self.differ_by(names)
        if differ <= _TOLERANCE:
            return f"{rounds}; the metrics of the last {_LAST} agree within {_TOLERANCE:.0%}"
        if now >= self._until:
            message = f", which differ by up to {differ:.0%}" if self.num >= _LAST else ""
            return f"{rounds}{message}: the {self._max_s:g} s of --budget were used up"
        return ""

    def part_done(self, now: float) -> float:
        """Returns the part of the time limit that is over, 0..1."""
        return min(1.0, 1.0 - (self._until - now) / self._max_s)


def _spread(rounds: Sequence[Mapping[Hashable, float]]) -> float:
    """Returns the largest relative difference of a measurement in three rounds."""
    spreads = []
    for name in set(rounds[0]).intersection(*rounds):
        low, middle, high = sorted(item[name] for item in rounds)
        spreads.append((high - low) / middle if middle else 0.0)
    return max(spreads, default=0.0)
