"""Decides which failures a restart may mend, how long it waits, and how often. Pure; time is the argument `now`.

Each process has a budget of restarts (launch.max_restarts). `Supervisor` (supervisor.py) asks here after each failure,
and starts the process again.

A worker:

    1, any signal, 15 (server not reached)   a crash, a kill, a bad moment: it is started again
    130, 143 (somebody asked it to end)      the job needs its number of workers: started again
    any other code                           a script's own; its meaning is unknown, and the budget limits the price
    2, 11, 12, 14, 16, 126                   usage, security, mismatch, files, divergence, no such program:
                                             a restart would fail the same way
    13 (not admitted, or replaced)           a restart would replace the rank's process, back and forth

A server, each shard alike, is the same except for two codes. 10 (cannot listen) is final at the first start, but not
later: the port was its own a moment ago and will be free soon. A server that somebody asked to end (130, 143) has sent
its workers away: that ends the job. A relay is started again.

An exception that recurs at the same place after a restart would recur for ever: it ends the job (one of files or
connections only until it is forgiven, see below). So does one that
every worker has raised, if it is a mistake in the program, before any of them was admitted again.

A process that was lost with its host (255) is started again as after a crash.

A process that has run for 60 s since its start is forgiven at the next failure of any process: its restarts count from
zero again, and it is no longer named as the first that failed.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..plan.process import SERVE, SERVER, Child
from .blame import Raised
from .exits import CANNOT_START

FORGIVEN_AFTER_S = 60.0
MAX_BACKOFF_S = 10.0

_FINAL = frozenset({2, 11, 12, 13, 14, 16, CANNOT_START})
_ASKED_TO_END = frozenset({130, 143, -2, -15})
_CANNOT_LISTEN = 10


class Failure(NamedTuple):
    """A process that failed, and how, as a phrase."""

    child: Child
    how: str

    def __str__(self) -> str:
        return f"{self.child} failed: {self.how}"


def can_mend(child: Child, code: int, *, has_listened: bool) -> bool:
    """Returns whether a restart may help. `has_listened`: this server has listened before."""
    if child.role == SERVER.role and not child.region and code in _ASKED_TO_END:
        return False
    if code == _CANNOT_LISTEN:
        return child.role == SERVER.role and has_listened
    return code not in _FINAL


class Restarts:
    """Counts the restarts of each process against the budget that each has."""

    def __init__(self, max_restarts: int, backoff_s: float) -> None:
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self._started_at: dict[Child, float] = {}  # of those that run
        self.num_restarts: Counter[Child] = Counter()
        self._raised: dict[Child, list[Raised | None]] = {}  # by each of its failures
        self._failures: dict[Child, Failure] = {}  # the first of each that is not forgiven, oldest first

    def started(self, child: Child, now: float) -> None:
        self._started_at[child] = now

    def ended_well(self, child: Child) -> None:
        del self._started_at[child]
        self._forgive(child)

    def failed(self, failure: Failure, now: float, raised: Raised | None = None) -> bool:
        """Count a failure, after forgiving the processes that have run long enough.

        Returns whether the same exception, at the same place, has ended this process before. A mistake in the program
        is never forgiven; a lost connection or a missing file is.
        """
        for child, since in self._started_at.items():
            if now - since >= FORGIVEN_AFTER_S:
                self._forgive(child)
        del self._started_at[failure.child]
        self._failures.setdefault(failure.child, failure)
        before = self._raised.setdefault(failure.child, [])
        before.append(raised)
        return raised is not None and raised.kind in [other.kind for other in before[:-1] if other is not None]

    def ended_by(self, child: Child, raised: Raised) -> bool:
        """Returns whether this was its newest failure."""
        last = next(reversed(self._raised.get(child, [])), None)
        return last is not None and last.kind == raised.kind

    def next(self, child: Child) -> float | None:
        """Take one restart from the child's budget. Returns in how many seconds, None if the budget is spent."""
        if self.num_restarts[child] >= self._max_restarts:
            return None
        self.num_restarts[child] += 1
        # The exponent is bounded, because 2.0 ** 2000 is an error and a budget may be as large.
        return min(MAX_BACKOFF_S, self._backoff_s * 2.0 ** min(self.num_restarts[child] - 1, 60))

    @property
    def first(self) -> Failure:
        """The oldest failure that is not forgiven, without those of ps-serve, which explain no other's."""
        return next(failure for failure in self._failures.values() if failure.child != SERVE)

    def _forgive(self, child: Child) -> None:
        self.num_restarts.pop(child, None)
        self._failures.pop(child, None)
        before = self._raised.get(child, [])
        before[:] = [raised for raised in before if raised is not None and raised.is_mistake]
