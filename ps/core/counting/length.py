"""The number of training steps of a run whose configuration does not set it: the first worker to report one decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...policies.base import Policy
from ..effects import Effect, Log


class Length:
    """The length of one run, kept in `policy.training_steps`. `by` is the rank that set it; None: no worker did."""

    def __init__(self, policy: Policy, epochs: int | None) -> None:
        self.policy = policy
        self._epochs = epochs
        self._configured = [policy.training_steps, epochs]  # of the configuration
        self.by: int | None = None
        self.is_reconfigured = False  # the snapshot's run had another configured length
        self._others: set[int] = set()  # ranks that announced another length

    def announced(self, rank: int, steps: int) -> Iterator[Effect]:
        """A worker announces the length that follows from its data set or its task."""
        has, fields = self.policy.training_steps, {"rank": rank, "steps": steps}
        if has is None:
            self.policy.training_steps, self.by = steps, rank
            yield Log("info", "length", fields)
        elif self.by is not None and has != steps and rank not in self._others:
            self._others.add(rank)
            meaning = f"the run has {has} training steps (rank {self.by}), rank {rank} would take {steps}"
            fix = "give every worker the same data set and batch size, or set --steps"
            yield Log("warning", "lengths_differ", {**fields, "meaning": meaning, "fix": fix})

    def saved(self) -> dict[str, Any]:
        announced = None if self.by is None else [self.policy.training_steps, self._epochs]
        return {"configured": self._configured, "length": announced}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `saved` returned, after the policy. Workers announce an absent length again."""
        self.is_reconfigured = saved.get("configured", self._configured) != self._configured
        match saved.get("length"):
            case [int(steps), epochs] if self.policy.training_steps is None and epochs == self._epochs:
                self.policy.training_steps, self.by = steps, min(self.policy.rows, default=0)
