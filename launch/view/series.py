"""Which run of several it is, and when all are over. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.reporting.pictures.words import about


@dataclass(frozen=True)
class Series:
    """Run `number` of `num_runs`, of which those before it took `took_s`."""

    number: int = 1
    num_runs: int = 1
    took_s: Sequence[float] = ()

    def told(self, run_s: float = 0.0, eta_s: float | None = None) -> str:
        """`run 5 of 14, about 3 min to go`; empty where there is one. Of this run, `run_s` are over and `eta_s` left,
        None where that is not known. Runs to come take what those before took in the mean, or else what this one
        takes."""
        if self.num_runs == 1:
            return ""
        name, later = f"run {self.number} of {self.num_runs}", self.num_runs - self.number
        if not self.took_s and eta_s is None:
            return name
        each = sum(self.took_s) / len(self.took_s) if self.took_s else run_s + (eta_s or 0.0)
        left = max(0.0, each - run_s) if eta_s is None else eta_s
        return f"{name}, about {about(left + later * each)} to go"

    def before(self, sentence: str) -> str:
        """The sentence with that before it."""
        told = self.told()
        return f"{told}: {sentence}" if told else sentence
