"""Learning rates of each rank's contributions.

A new process of a rank receives the first and the newest. It compares them with its own schedule, to find out whether
the schedule continues or begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....common.wire.records import RateInfo

_Groups = tuple[dict[str, Any], ...]


class Rates:
    """The first and newest learning rates of all ranks."""

    def __init__(self) -> None:
        self._of_rank: dict[int, RateInfo] = {}
        self._newest: dict[int, _Groups] = {}  # by rank: the hyperparameters that its newest rates were taken from

    def counted(self, rank: int, hyperparameters: _Groups | None, first: Sequence[float]) -> None:
        """Note the rates of a contribution that counts. `first` has the rates of its process's first step."""
        if hyperparameters is None or self._newest.get(rank) is hyperparameters:
            return
        self._newest[rank] = hyperparameters
        last = tuple(rate_of(group) for group in hyperparameters)
        known = self._of_rank.get(rank) or RateInfo(tuple(first) or last, last, 0)
        self._of_rank[rank] = RateInfo(known.first, last, known.num_changes + (last != known.last))

    def of(self, rank: int) -> RateInfo | None:
        return self._of_rank.get(rank)

    def saved(self) -> dict[str, list[Any]]:
        return {
            str(rank): [list(item.first), list(item.last), item.num_changes] for rank, item in self._of_rank.items()
        }

    def restore(self, saved: Any) -> None:
        """Restore the rates of a snapshot; absent and malformed values are unknown."""
        for rank, groups in saved.items() if isinstance(saved, dict) else ():
            match groups:
                case [list(first), list(last), int(num_changes)] if rank.isdecimal() and _are_rates(first + last):
                    self._of_rank[int(rank)] = RateInfo(tuple(first), tuple(last), num_changes)


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group of hyperparameters; 0 where it has none."""
    rate = group.get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float) else 0.0


def _are_rates(found: list[Any]) -> bool:
    return all(type(item) in (int, float) and math.isfinite(item) for item in found)
