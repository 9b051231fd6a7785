"""What every mode shares: members, steps, repeated contributions, admission, and who waits for what.

A policy is a pure state machine. Events come in, each with the time; decisions come out,
each with its reason as a sentence. Waiting is the absence of a decision. Same state and
event, same decisions: no clock, no input or output, no randomness.

    joined(rank)         a worker has the model and asks for weights to start from
    contributed(rank)    a whole, finite contribution lies staged
    left(rank)           the worker is gone, for whatever reason
    tick(now)            time has passed

A mode says two things (see `async_.py`, `ssp.py`, `rounds.py`): what a contribution does
(`_take`), and why a worker must wait before its next step (`_gate`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal


class Outcome(Enum):
    """What became of a contribution; names are those of Answer.Outcome in the proto."""

    START = "start"
    APPLIED = "applied"
    REPEATED = "repeated"
    DROPPED = "dropped"


_WHY_GO = {
    Outcome.START: "start from these weights",
    Outcome.APPLIED: "applied",
    Outcome.REPEATED: "repeated: nothing folded",
    Outcome.DROPPED: "came after its round had closed: nothing folded",
}


@dataclass(frozen=True)
class Fold:
    """Add the staged contribution of `rank` to the mean being formed, with this weight."""

    rank: int
    weight: float


@dataclass(frozen=True)
class Discard:
    """Forget the staged contribution of `rank`."""

    rank: int


@dataclass(frozen=True)
class Commit:
    """Make the mean of what was folded, from `ranks`, the next version."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Answer:
    """Let `rank` go on, with the newest weights."""

    rank: int
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Refuse:
    """End this worker's call: `kind` is NOT_JOINED or STEP_GAP."""

    rank: int
    kind: Literal["NOT_JOINED", "STEP_GAP"]
    reason: str


Decision = Fold | Discard | Commit | Answer | Refuse


@dataclass(frozen=True)
class Options:
    """What a mode may be told; the configuration's `policy` section documents each."""

    steps: int = 1_000_000
    num_workers: int | None = None  # training starts when all of them have joined
    min_workers: int = 1
    staleness: int = 0
    local_steps: int = 1
    straggler_timeout_s: float | None = None
    backup_workers: int = 0
    weighting: Literal["samples", "equal"] = "samples"
    pipelined: bool = False  # workers compute their next step while an exchange is in flight
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contribution:
    """The facts of one staged contribution."""

    step: int
    base_version: int
    num_samples: int = 1


@dataclass
class Member:
    """A live worker. `pending` is the outcome it will be answered with; None while it computes."""

    rank: int
    step: int
    pending: Outcome | None = Outcome.START
    is_fresh: bool = True  # nothing contributed since it was let in


class Policy(ABC):
    """One mode. Subclasses set `contribution` and implement `_take` and `_gate`."""

    # What workers send: the server runs the optimizer on gradients and averages weights.
    contribution: ClassVar[Literal["gradient", "weights"]] = "gradient"
    # Whether a worker may contribute without fetching weights (policy.pull_every).
    may_skip_pulls: ClassVar[bool] = False
    # Whether a commit is one step along the gradients of all, which something other than their mean may then
    # stand for (policy.aggregation).
    may_aggregate: ClassVar[bool] = False
    # Whether workers may compute their next step while an exchange is in flight (policy.pipelined),
    # and the least policy.staleness with which they may.
    may_pipeline: ClassVar[bool] = False
    least_pipelined_staleness: ClassVar[int] = 0

    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = 0  # commits decided
        self.members: dict[int, Member] = {}
        # Contributions counted per rank, kept after it leaves: what makes a repeated one harmless.
        self.last_step: dict[int, int] = {}
        self.has_started = False
        self._first_step = 0  # of a rank that is new while nobody is live

    # ---- what a snapshot keeps -----------------------------------------------------------

    def committed_steps(self) -> dict[int, int]:
        """Contributions per rank that the newest version holds, with those that came to nothing."""
        return dict(self.last_step)

    def restore(self, version: int, steps: Mapping[int, int]) -> None:
        """Go on from a snapshot, with whichever workers join. Before any event."""
        self.version = version
        self.last_step = dict(steps)
        self._first_step = min(steps.values(), default=0)

    # ---- events ------------------------------------------------------------------------

    def joined(self, rank: int, now: float) -> list[Decision]:
        """A worker is ready for weights. A rank that was here before goes on at its own step; one that is
        new to a running job starts at the slowest live step, so that it neither stalls the others nor
        repeats what they have done."""
        step = self.last_step.setdefault(rank, self.min_step)
        self.members[rank] = Member(rank, step)
        return self._joined(rank) + self._settle(now)

    def left(self, rank: int, now: float) -> list[Decision]:
        """A worker is gone; whoever waited for it is looked at again at once."""
        if self.members.pop(rank, None) is None:
            return []
        return self._left(rank) + self._settle(now)

    def disconnected(self, rank: int) -> None:
        """A worker is still a member, but an answer would not reach it: it will ask again."""
        if rank in self.members:
            self.members[rank].pending = None

    def contributed(self, rank: int, contribution: Contribution, now: float) -> list[Decision]:
        """A contribution is staged: fold it, or discard it with an answer or a refusal."""
        member = self.members.get(rank)
        if member is None:
            return [Discard(rank), Refuse(rank, "NOT_JOINED", f"rank {rank} left; it must join again first")]
        if contribution.step == self.last_step[rank]:
            # Applied before, and its answer was lost. Where it still waits for its round, so does the repeat.
            member.pending = Outcome.REPEATED
            return [Discard(rank), *self._settle(now)]
        if contribution.step != self.last_step[rank] + 1:
            reason = f"rank {rank} sent step {contribution.step}; the next one is {self.last_step[rank] + 1}"
            return [Discard(rank), Refuse(rank, "STEP_GAP", reason)]
        decisions = self._take(member, contribution, now)
        member.is_fresh = False
        return decisions + self._settle(now)

    def tick(self, now: float) -> list[Decision]:
        """Look again at whatever depends on time."""
        return self._settle(now)

    # ---- questions ------------------------------------------------------------------------

    @property
    def min_step(self) -> int:
        """Step of the slowest live worker."""
        return min((member.step for member in self.members.values()), default=self._first_step)

    def lead(self, rank: int) -> int:
        """Steps of a live worker ahead of the slowest live one."""
        return self.members[rank].step - self.min_step

    def next_local_steps(self, rank: int) -> int:
        """Local steps the worker takes before its next contribution; 0 when it has taken all."""
        done = self._rounds_done(rank) * self.local_steps
        return max(0, min(self.local_steps, self.options.steps - done))

    def steps_done(self, rank: int) -> int:
        """Training steps (batches) of the rank that count."""
        return min(self.options.steps, self._rounds_done(rank) * self.local_steps)

    @property
    def local_steps(self) -> int:
        """Training steps in one contribution."""
        return 1

    @property
    def staleness_bound(self) -> int | None:
        """How far ahead of the slowest a worker may start a step; None where nothing bounds it by lead."""
        return None

    def staleness(self, rank: int, contribution: Contribution) -> int:
        """Versions between the weights a contribution was computed on and those it is about to meet."""
        return max(0, self.version - contribution.base_version)

    def upload_position(self, rank: int) -> int:
        """How many contributions are folded before this worker's; uploads are staged in this order."""
        return 0

    def waiting(self) -> dict[int, str]:
        """Why each waiting worker waits."""
        return {
            member.rank: reason
            for member in self.members.values()
            if member.pending is not None and (reason := self._why_wait(member)) is not None
        }

    def waiting_reason(self) -> str:
        """What everyone waits for, as one sentence; empty when somebody may compute."""
        held = self._why_hold()
        if held is not None:
            return held
        reasons = self.waiting()
        if not reasons or len(reasons) < len(self.members):
            return ""
        return next(iter(reasons.values()))

    # ---- what a mode says -----------------------------------------------------------------

    @abstractmethod
    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        """Decide on the next contribution of a live worker. Call `_count` when it is accepted."""

    def _gate(self, member: Member) -> str | None:
        """Why this worker may not start its next step yet; None when it may."""
        return None

    def _advance(self, now: float) -> list[Decision]:
        """Commits that became possible; called after every event, before anyone is answered."""
        return []

    def _joined(self, rank: int) -> list[Decision]:
        return []

    def _left(self, rank: int) -> list[Decision]:
        return []

    def _rounds_done(self, rank: int) -> int:
        """Contributions of the rank, or rounds of the run, that count towards `steps`."""
        return self.last_step.get(rank, 0)

    # ---- shared moves ---------------------------------------------------------------------

    def _count(self, member: Member, outcome: Outcome = Outcome.APPLIED) -> None:
        member.step += 1
        self.last_step[member.rank] = member.step
        member.pending = outcome

    def _commit(self, ranks: tuple[int, ...], reason: str) -> Commit:
        self.version += 1
        return Commit(ranks, reason)

    def _weight(self, contribution: Contribution) -> float:
        return float(contribution.num_samples) if self.options.weighting == "samples" else 1.0

    def _why_hold(self) -> str | None:
        """Why nobody may go on, whatever the mode."""
        live = len(self.members)
        if not self.has_started and self.options.num_workers is not None and live < self.options.num_workers:
            missing = [rank for rank in range(self.options.num_workers) if rank not in self.members]
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return f"{live} of {self.options.num_workers} workers have joined; missing rank {names}"
        if live < self.options.min_workers:
            return f"{live} of at least {self.options.min_workers} workers (policy.min_workers) are live"
        return None

    def _why_wait(self, member: Member) -> str | None:
        return self._why_hold() or self._gate(member)

    def _settle(self, now: float) -> list[Decision]:
        """Commit what can be committed, then answer everyone who may go on."""
        if self._why_hold() is not None:
            return []
        self.has_started = True
        decisions = self._advance(now)
        waiting = [member for member in self.members.values() if member.pending is not None]
        for member in sorted(waiting, key=lambda member: member.rank):
            if self._gate(member) is None:
                outcome = member.pending or Outcome.APPLIED
                decisions.append(Answer(member.rank, outcome, _WHY_GO[outcome]))
                member.pending = None
        return decisions
