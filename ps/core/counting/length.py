"""How many training steps a run has, where its configuration does not say: the workers' word, of which the first
counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...policies.base import Policy
from ..effects import Effect, Log


class Length:
    """Of one run, kept in `policy.training_steps`. `by` is the rank that said it; None where nobody had to."""

    def __init__(self, policy: Policy, epochs: int | None) -> None:
        self.policy = policy
        self._epochs = epochs
        self._configured = [policy.training_steps, epochs]  # of the configuration
        self.by: int | None = None
        self.is_reconfigured = False  # it goes on from a snapshot of a run that was asked for something else
        self._others: set[int] = set()  # ranks that said another

    def announced(self, rank: int, steps: int) -> Iterator[Effect]:
        """A worker knows its data set, or its task."""
        has, fields = self.policy.training_steps, {"rank": rank, "steps": steps}
        if has is None:
            self.policy.training_steps, self.by = steps, rank
            yield Log("info", "length", fields)
        elif self.by is not None and has != steps and rank not in self._others:
            self._others.add(rank)
            meaning = f"the run has {has} training steps (rank {self.by}), rank {rank} would take {steps}"
            fix = "give every worker the same data set and batch size, or the run a number of --steps"
            yield Log("warning", "lengths_differ", {**fields, "meaning": meaning, "fix": fix})

    def saved(self) -> dict[str, Any]:
        announced = None if self.by is None else [self.policy.training_steps, self._epochs]
        return {"configured": self._configured, "length": announced}

    def restore(self, saved: dict[str, Any]) -> None:
        """After the policy. What is not there is of an older snapshot, or asked of the workers again."""
        self.is_reconfigured = saved.get("configured", self._configured) != self._configured
        match saved.get("length"):
            case [int(steps), epochs] if self.policy.training_steps is None and epochs == self._epochs:
                self.policy.training_steps, self.by = steps, min(self.policy.num_counted, default=0)
