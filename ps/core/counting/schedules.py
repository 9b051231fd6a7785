"""Refuses ranks whose hyperparameters differ, where one step is made of the contributions of several."""

from __future__ import annotations

from typing import Any

from ....common.errors import ParamServerError, Reason, refusal

_Groups = tuple[dict[str, Any], ...]


class Schedules:
    """The hyperparameters of what counts since the newest commit.

    They are compared between processes that are at the same training step, and in as many steps of their own: a process
    that replaced another one may have begun its schedule anew, and one whose scaler skipped a step is ahead.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[int, _Groups]] = {}  # by the steps of the rank and of its process

    def committed(self) -> None:
        self._found.clear()

    def differ(self, rank: int, at: tuple[int, int], groups: _Groups) -> ParamServerError | None:
        """Returns the refusal of a contribution with other hyperparameters than another rank's there."""
        other, known = self._found.setdefault(at, (rank, groups))
        if known is groups or known == groups:
            return None
        number, name = _first_difference(known, groups)
        theirs, mine = (item[number].get(name) if number < len(item) else None for item in (known, groups))
        where = f" of parameter group {number}" if len(groups) > 1 else ""
        return refusal(
            Reason.OPTIMIZER_MISMATCH,
            f"rank {rank} has {name} {mine}{where} and rank {other} has {theirs}, at the same training step: one step "
            "is made of the contributions of both",
            fix="give all ranks the same hyperparameters and schedules (a schedule that follows a loss: the mean of "
            "all ranks); or use a mode whose workers step by themselves, such as localsgd",
        )


def _first_difference(known: _Groups, groups: _Groups) -> tuple[int, str]:
    """Returns the number of the first group that differs, and the name of a value that does."""
    for number in range(max(len(known), len(groups))):
        mine, theirs = (item[number] if number < len(item) else {} for item in (known, groups))
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return number, name
    return 0, "lr"
