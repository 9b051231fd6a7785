"""Counts and measurements of one simulated run."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, NamedTuple

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
        self.flush(1)
        return self._hash.hexdigest()[:16]

    def flush(self, least: int = FLUSHED) -> None:
        """Replace lines by their hash, block after block, while there are at least so many."""
        while len(self.lines) >= least:
            self._hash.update(repr(self.lines[:FLUSHED]).encode())
            del self.lines[:FLUSHED]
