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

import builtins
import re
import signal
from collections import Counter
from typing import NamedTuple

from ...common.errors import UnreachableError, UsageError
from ..plan.hosts import SERVE, SERVER, Child

# ---- how a process ended -------------------------------------------------------------------------
# The meaning of exit codes.


MEANINGS = {
    0: "done",
    1: "an exception",
    2: "usage or configuration",
    10: "cannot listen on the address",
    11: "TLS or token",
    12: "model or run mismatch",
    13: "not admitted or evicted",
    14: "a file cannot be written or read",
    15: "the peer cannot be reached",
    16: "diverged",
    17: "restart budget spent",
    126: "cannot be started",
    130: "interrupted",
    143: "drained on SIGTERM",
    255: "its host was lost",
}

USAGE, UNREACHABLE = UsageError.exit_code, UnreachableError.exit_code
BUDGET_SPENT = 17
HOST_LOST = 255  # as ssh says of itself
CANNOT_START = 126  # as a shell says of a program it cannot execute


def describe_exit(code: int, *, is_script: bool = False) -> str:
    """`exit code 12 (model or run mismatch)`, or `killed by SIGKILL` for a negative code."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    if code == 1 and is_script:
        return "exit code 1 (the script failed)"
    meaning = MEANINGS.get(code)
    return f"exit code {code} ({meaning})" if meaning else f"exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- restarts ------------------------------------------------------------------------------------

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


def can_mend(child: Child, code: int, *, has_listened: bool, keeps_workers: bool = False) -> bool:
    """Returns whether a restart may help. `has_listened`: this server has listened before. `keeps_workers`: its workers
    wait for it, even if it was asked to end."""
    if child.role == SERVER.role and not keeps_workers and code in _ASKED_TO_END:
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


# ---- the exception that ended a process ----------------------------------------------------------
# Finds the exception that ended a process, and its place, in the traceback that Python prints. Pure.
#
# The exception is usually in the user's code. It is shown once, even if many processes raise it many times.


_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_HEADING = "Traceback (most recent call last):"
# What torch.distributed and scripts for torchrun read from the environment.
_OF_A_PROCESS_GROUP = re.compile(r"\b(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")


class Raised(NamedTuple):
    """An exception, `ValueError: bad batch`, and the innermost `FILE, line N` of its traceback outside of libraries."""

    text: str
    where: str

    @property
    def kind(self) -> tuple[str, str]:
        """Equal for the same mistake; messages differ in values."""
        return self.text.partition(":")[0], self.where

    @property
    def is_mistake(self) -> bool:
        """Whether it is a mistake in the program: an exception of Python, but not of files, connections or memory."""
        kind = getattr(builtins, self.kind[0], None)
        return isinstance(kind, type) and not issubclass(kind, (OSError, EOFError, MemoryError))

    @property
    def variable(self) -> str:
        """The variable of a process group that the script did not find; "" for other exceptions."""
        found = _OF_A_PROCESS_GROUP.search(self.text)
        return found[0] if found and self.kind[0] in ("KeyError", "ValueError", "TypeError") else ""

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


class Blame:
    """Reads the lines of each process of a job."""

    def __init__(self) -> None:
        self._pending: dict[Child, list[str]] = {}  # lines of an incomplete traceback
        self.last: dict[Child, Raised] = {}  # of each process: what it raised, and did not go on from
        self._reporting: set[Child] = set()  # they have connected, and so say when nothing catches an exception
        self._ended: set[Child] = set()  # by an exception that nothing caught
        self._shown: set[tuple[str, str]] = set()

    def started(self, child: Child) -> None:
        self.last.pop(child, None)
        self._ended.discard(child)
        self._reporting.discard(child)

    def connected(self, child: Child) -> None:
        """The process writes events: it went on from what it raised before."""
        if child not in self._reporting:
            self._reporting.add(child)
            self.last.pop(child, None)

    def uncaught(self, child: Child) -> None:
        """The process has said that its last traceback ends it. Lines after that are of its exit handlers."""
        self._ended.add(child)
        self._reporting.add(child)

    def read(self, child: Child, line: str) -> list[str]:
        """Returns the lines to show now: a traceback once it is complete, or one line if it was shown before."""
        lines = self._pending.get(child)
        if lines is None and line != _HEADING and not _FRAME.match(line):
            if line[:1].strip() and child in self._reporting - self._ended:
                self.last.pop(child, None)  # it went on: it has handled that exception
            return [line]
        lines = self._pending.setdefault(child, [])
        lines.append(line)
        if line.startswith(" ") or line == _HEADING:
            return []
        del self._pending[child]
        frames = [found for line in lines if (found := _FRAME.match(line))]
        if not frames:
            return lines
        file, number = next((found for found in reversed(frames) if not _LIBRARY.search(found[1])), frames[-1]).groups()
        raised = self.last[child] = Raised(line, f"{file}, line {number}")
        if raised.kind in self._shown:
            return [f"{raised}: the same as above"]
        self._shown.add(raised.kind)
        return lines

    def rest(self, child: Child) -> list[str]:
        """Returns the lines of a traceback in whose middle the process ended."""
        return self._pending.pop(child, [])
