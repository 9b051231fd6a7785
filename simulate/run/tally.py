"""Counts and measurements of one simulated run."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, NamedTuple

from .worker import Worker

CAUSES = ("compute", "mode", "staging", "server", "its link", "own link")
FLUSHED = 4096  # lines at once


class Sample(NamedTuple):
    """A sample of one moment."""

    at: float
    skew: int  # versions between the oldest and the newest that a worker holds
    seconds: dict[str, float]  # by cause, from the beginning on


class Tally:
    """Counters of a run, and the workers' seconds by cause. `digest`: of all events in order."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.staleness: Counter[int] = Counter()  # of contributions that count
        self.num_steps = 0  # training steps in them
        self.decision_s: list[float] = []  # cost of each contribution's decisions
        self.num_failures = 0
        self.samples: list[Sample] = []
        self._hash = hashlib.sha256()
        self.lines: list[tuple[Any, ...]] = []  # that are not hashed yet
        self.note = self.lines.append  # one line of what happened; `flush` when there are FLUSHED

    @property
    def digest(self) -> str:
        """A hash of all events, in order, with their times."""
        self._hash_lines(len(self.lines))
        return self._hash.hexdigest()[:16]

    def sample(self, at: float, skew: int) -> None:
        self.samples.append(Sample(at, skew, dict(self.seconds)))

    def flush(self) -> None:
        """Replace full blocks of lines by their hash."""
        while len(self.lines) >= FLUSHED:
            self._hash_lines(FLUSHED)

    def _hash_lines(self, num: int) -> None:
        if num:
            self._hash.update(repr(self.lines[:num]).encode())
            del self.lines[:num]

    def exchanged(self, worker: Worker, gate_wait_s: float, own_s: float, rest_cause: str) -> None:
        """Add the time of a worker's exchange by cause."""
        seconds = self.seconds
        server_s, staged_s = worker.left_at - worker.decided_at, worker.begun_at - worker.sent_at
        seconds["mode"] += gate_wait_s
        seconds["own link"] += own_s
        seconds["server"] += server_s
        seconds["staging"] += staged_s
        rest_s = worker.transfer_s - own_s - server_s - staged_s
        if rest_s > 0.0:
            seconds[rest_cause] += rest_s
