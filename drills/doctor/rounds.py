"""When ps-launch doctor has measured enough: figures agree, or its time is over. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

_LAST, _WITHIN = 3, 0.05  # rounds that have to agree, by how much


class Rounds:
    """Rounds of the same measurements, one after another. `most_s`: from the first moment on."""

    def __init__(self, began_at: float, most_s: float) -> None:
        self._until, self._most_s = began_at + most_s, most_s
        self._figures: list[Mapping[Hashable, float]] = []

    @property
    def num(self) -> int:
        return len(self._figures)

    def add(self, figures: Mapping[Hashable, float]) -> None:
        """A round is over: what was measured in it, by what it is of."""
        self._figures.append(figures)

    def differ_by(self) -> float:
        """The largest difference of a figure in the last three rounds, as a part of its median; inf: too few rounds."""
        last = self._figures[-_LAST:]
        if len(last) < _LAST:
            return float("inf")
        names = set(last[0]).intersection(*last)
        spreads = []
        for name in names:
            low, middle, high = sorted(one[name] for one in last)
            spreads.append((high - low) / middle if middle else 0.0)
        return max(spreads, default=0.0)

    def why_stop(self, now: float) -> str:
        """A sentence; empty: go on. The first round is always measured whole."""
        if not self._figures:
            return ""
        rounds = f"{self.num} round{'s' if self.num > 1 else ''}"
        differ = self.differ_by()
        if differ <= _WITHIN:
            return f"{rounds}; the last {_LAST} agree within {_WITHIN:.0%}"
        if now >= self._until:
            told = f", which differ by up to {differ:.0%}" if self.num >= _LAST else ""
            return f"{rounds}{told}: the {self._most_s:g} s of --budget were used up"
        return ""

    def part_done(self, now: float) -> float:
        """Of the whole, 0..1, as far as can be said: three rounds, or the time that may be used."""
        left_s = max(0.0, self._until - now)
        return max(min(1.0, self.num / _LAST), 1.0 - left_s / self._most_s)
