"""What is counted and measured of one simulated run."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, NamedTuple

from ...ps.core import effects
from .worker import Worker

CAUSES = ("compute", "mode", "staging", "server", "its link", "own link")
_FLUSHED = 4096  # lines at once


class Sample(NamedTuple):
    """Of one moment."""

    at: float
    skew: int  # versions between the oldest and the newest that a worker holds
    seconds: dict[str, float]  # by cause, from the beginning on


class Tally:
    """Seconds of all workers by what they were spent on, and so on; `digest` is of everything in its order."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.staleness: Counter[int] = Counter()  # of contributions that count
        self.num_steps = 0  # training steps in them
        self.decision_s: list[float] = []  # that each contribution cost the run
        self.num_failures = 0
        self.samples: list[Sample] = []
        self._hash = hashlib.sha256()
        self._lines: list[tuple[Any, ...]] = []

    @property
    def digest(self) -> str:
        """Of everything that happened, in order, with its time."""
        self._flush()
        return self._hash.hexdigest()[:16]

    def note(self, *what: Any) -> None:
        """One line of what happened."""
        self._lines.append(what)
        if len(self._lines) >= _FLUSHED:
            self._flush()

    def sample(self, at: float, skew: int) -> None:
        self.samples.append(Sample(at, skew, dict(self.seconds)))

    def _flush(self) -> None:
        if self._lines:
            self._hash.update(repr(self._lines).encode())
            self._lines.clear()

    def answered(self, answer: effects.Answer) -> None:
        """The run has decided on an answer."""
        if answer.outcome == "APPLIED":
            self.staleness[answer.staleness] += 1

    def exchanged(self, worker: Worker, held_s: float, own_s: float, rest_cause: str) -> None:
        """Where the time of this worker's exchange went: held by the mode, on its own link, and the rest."""
        seconds = self.seconds
        server_s, staged_s = worker.left_at - worker.decided_at, worker.begun_at - worker.sent_at
        seconds["mode"] += held_s
        seconds["own link"] += own_s
        seconds["server"] += server_s
        seconds["staging"] += staged_s
        rest_s = worker.transfer_s - own_s - server_s - staged_s
        if rest_s > 0.0:
            seconds[rest_cause] += rest_s
