"""The position of a run among several, and the time until all are over. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.reporting.pictures.words import about


@dataclass(frozen=True)
class Series:
    """Run `number` of `num_runs`; `took_s`: seconds of the runs before it."""

    number: int = 1
    num_runs: int = 1
    took_s: Sequence[float] = ()

    def text(self, run_s: float = 0.0, eta_s: float | None = None) -> str:
        """Returns `run 5 of 14, about 3 min to go`, empty for a single run.

        `run_s`, `eta_s`: seconds over and left of this run, None if unknown. Later runs are estimated by the mean of
        earlier ones, or by this one.
        """
        if self.num_runs == 1:
            return ""
        name, later = f"run {self.number} of {self.num_runs}", self.num_runs - self.number
        if not self.took_s and eta_s is None:
            return name
        each = sum(self.took_s) / len(self.took_s) if self.took_s else run_s + (eta_s or 0.0)
        left = max(0.0, each - run_s) if eta_s is None else eta_s
        return f"{name}, about {about(left + later * each)} to go"

    def before(self, sentence: str) -> str:
        """Returns the sentence after this text."""
        text = self.text()
        return f"{text}: {sentence}" if text else sentence
