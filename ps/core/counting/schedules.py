"""Refuses ranks whose hyperparameters differ, where one step is made of the contributions of several."""

from __future__ import annotations

import math
from typing import Any

from ....common.errors import ParamServerError, Reason, refusal

_Groups = tuple[dict[str, Any], ...]
_ROUNDINGS = 1e-9  # relative


class Schedules:
    """The hyperparameters of what counts since the newest commit.

    They are compared between processes that are at the same training step, and in as many steps of their own: a process
    that replaced another one may have begun its schedule anew, and one whose scaler skipped a step is ahead.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[int, _Groups]] = {}  # by the steps of the rank and of its process

    def committed(self) -> None:
        self._found.clear()

    def counted(self, rank: int, at: tuple[int, int], groups: _Groups) -> None:
        self._found.setdefault(at, (rank, groups))

    def differ(self, rank: int, at: tuple[int, int], groups: _Groups) -> ParamServerError | None:
        """Returns the refusal of a contribution with other hyperparameters than one that counts, of another rank."""
        other, known = self._found.get(at, (rank, groups))
        if (difference := first_difference(known, groups)) is None:
            return None
        number, name = difference
        theirs, mine = (item[number].get(name) if number < len(item) else None for item in (known, groups))
        where = f" of parameter group {number}" if len(groups) > 1 else ""
        return refusal(
            Reason.OPTIMIZER_MISMATCH,
            f"rank {rank} has {name} {mine}{where} and rank {other} has {theirs}, at the same training step: one step "
            "is made of the contributions of both",
            fix="give all ranks the same hyperparameters and schedules (a schedule that follows a loss: the mean of "
            "all ranks); or use a mode whose workers step by themselves, such as localsgd",
        )


def first_difference(known: _Groups, groups: _Groups) -> tuple[int, str] | None:
    """Returns the number of the first group that differs, and the name of a value that does; None: none does.

    Up to roundings, which differ between machines: schedules compute with `math.cos`."""
    if known is groups or known == groups:
        return None
    for number in range(max(len(known), len(groups))):
        mine, theirs = (item[number] if number < len(item) else {} for item in (known, groups))
        for name in {**mine, **theirs}:
            if not _is_equal(mine.get(name), theirs.get(name)):
                return number, name
    return None


def _is_equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=_ROUNDINGS)
    return bool(mine == theirs)
