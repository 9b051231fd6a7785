"""Gates: which workers wait before they compute again, and why."""

from __future__ import annotations

from collections.abc import Iterable

from .decisions import Reply
from .ledger import Ledger
from .members import Common, Member, names
from .waiting import Closed, Waiting


class Gates(Ledger):
    """A worker waits while its reply is pending. A mode's `_gate` returns the reason."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self.has_started = False
        self.paused: set[int] = set()  # live ranks whose replies wait for a resume
        self._waiting = Waiting()
        self._needed = self._num_needed()

    def _gate(self, member: Member, now: float) -> Closed | str | None:
        """Returns the reason that this worker may not compute its next contribution yet; None when it may.

        A gate with a sentence is checked after every event, which takes time in proportion to the waiting workers. A
        gate that is `Closed` is checked when progress reaches its value."""
        return None

    def _progress(self) -> int:
        """The number that `Closed` gates wait for."""
        return 0

    def _num_needed(self) -> int:
        """The number of live workers that every mode needs before any worker may continue."""
        if self.is_stopping:
            return 0
        to_start = 0 if self.has_started else self.common.num_workers or 0
        return max(1, max(to_start, self.common.min_workers) - len(self.finished_ranks))

    def _let_go(self, now: float) -> list[Reply]:
        """Returns replies to all workers whose gate is open."""
        replies, waiting = list[Reply](), self._waiting
        are_open = self.is_stopping and not self.has_rounds
        for rank in waiting.due(self._progress()):
            member = self.members[rank]
            if member.pending is None:
                continue
            if rank in self.paused:
                waiting.shut(rank, None)
                continue
            gate = None if are_open else self._gate(member, now)
            if gate is None:
                replies.append(Reply(rank, member.pending))
                waiting.ranks.discard(rank)
                member.pending = None
            else:
                waiting.shut(rank, gate.until if isinstance(gate, Closed) else None)
        return replies

    # ---- why, for people -------------------------------------------------------------------

    def waiting(self, now: float, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Returns the reason of each waiting worker, or of those in `ranks`."""
        all_wait = self._why_all_wait()
        selected = self._waiting.ranks if ranks is None else [rank for rank in ranks if rank in self._waiting.ranks]
        sentences: dict[object, str] = {}  # a sentence shared by many workers is made once
        return {rank: all_wait or self._why_waits(rank, now, sentences) for rank in sorted(selected)}

    def waiting_reason(self, now: float) -> str:
        """Returns the reason that all workers wait, as a sentence; empty when one may compute."""
        if (reason := self._why_all_wait()) is not None:
            return reason
        do_all_wait = self._ranks and len(self._waiting.ranks) == len(self._ranks)
        return self._why_waits(self._ranks[0], now, {}) if do_all_wait else ""

    def holders(self) -> tuple[int, ...]:
        """The live ranks that the others wait for, ascending: in a round the missing ones, else the slowest."""
        ranks = self._ranks if self.has_rounds else self._standing.slowest_ranks
        return tuple(sorted(rank for rank in ranks if rank not in self._waiting.ranks or rank in self.paused))

    def _why_waits(self, rank: int, now: float, sentences: dict[object, str]) -> str:
        if rank in self.paused:
            return "a resume: a user paused this worker"
        gate = self._gate(self.members[rank], now)
        if not isinstance(gate, Closed):
            return gate or ""
        if gate.why not in sentences:
            sentences[gate.why] = gate.why()
        return sentences[gate.why]

    def _why_all_wait(self) -> str | None:
        live, num_workers = len(self.members), self.common.num_workers
        if live >= self._needed:
            return None
        if not self.has_started and num_workers is not None and live < num_workers:
            missing = (
                rank for rank in range(num_workers) if rank not in self.members and rank not in self.finished_ranks
            )
            return f"{live} of {num_workers} workers have joined; missing rank {names(missing)}"
        return f"{live} of at least {self.common.min_workers} workers (policy.min_workers) are live"
