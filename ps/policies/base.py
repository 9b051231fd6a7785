"""What every mode shares: members, counting, repeated contributions, admission, and who waits for what.

A policy is a pure state machine. Events come in, each with the time; decisions come out (`shared/decisions.py`),
each with its reason as a sentence. Waiting is the absence of a decision. Same state and event, same
decisions: no clock, no input or output, no randomness.

    joined(rank)         a worker has the model and asks for weights to start from
    contributed(rank)    a whole, finite contribution lies staged
    rejected(rank)       one came that cannot be used (NaN); it lies nowhere and counts for nothing
    disconnected(rank)   a member's connection is lost, and replies do not reach it
    left(rank)           the worker is gone, for whatever reason
    finished(rank)       it takes no more training steps, though it has not taken all
    stopped()            nobody is to compute any more
    tick(now)            time has passed

A mode says two things (see `single.py`, `ssp.py`, `shared/rounds.py`): what a contribution does (`_take`), and why a
worker must wait before it computes the next one (`_gate`).

A contribution gets its reply after the commit that it is in, or, where `replies_before_commit`, from its fold on (a
buffer: fold, reply at once, commit when K are there). It counts from `_count` on: when it comes again, because its
reply was lost, it gets its reply and not folded, and when its sender dies it is in the next commit all the same. A
snapshot holds what its version holds: what was folded since, replied or not, is computed again after a crash, by
workers that begin where the snapshot has them (`num_committed`). So nothing is lost, and nothing counts twice. What
is folded when the last worker has taken all its training steps, the mode commits in that event.

Contributions are numbered from 1, per rank. A *training step* is a batch: in localsgd a contribution covers
several. Every event costs the same however many workers there are: what all members would have to be asked
is kept up to date instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ...common.config.option import Section
from ...common.kinds import ContributionKind
from ...common.wire.records import Contribution, Outcome
from .rules import Rule
from .shared.decisions import Commit, Decision, Discard, Fold, Merge, Outer, Refuse, Reply
from .shared.late import Compensation
from .shared.members import Common, Member, canonical, names
from .shared.standing import Standing
from .shared.waiting import Closed, Waiting

__all__ = [
    "Closed",
    "Commit",
    "Common",
    "Contribution",
    "Decision",
    "Discard",
    "Fold",
    "Member",
    "Merge",
    "Outcome",
    "Outer",
    "Policy",
    "Refuse",
    "Reply",
    "names",
]  # fmt: skip

ROUNDS = -1  # in the place of a rank, where all are counted together


class Policy(ABC):
    """One mode. Subclasses implement `_take` and, where somebody may have to wait, `_gate`."""

    # The mode's own options: a subclass beside its policy, whose fields `--help` and the configuration show.
    Options: ClassVar[type[Section]] = Section
    # What its histories must keep to, beyond what holds in every mode.
    rules: ClassVar[tuple[type[Rule], ...]] = ()
    kind: ContributionKind = ContributionKind.GRADIENT  # what workers send
    # Whether a commit is one step along the gradients of all, which something other than their mean may then
    # stand for (policy.aggregation).
    may_aggregate: ClassVar[bool] = False
    # Whether workers may compute their next contribution while an exchange is in flight (policy.delayed_update),
    # and the least policy.staleness with which they may.
    may_delay_update: ClassVar[bool] = False
    least_delayed_staleness: ClassVar[int] = 0
    # Whether a version is a round of all live workers, who all get it: the run's length is then counted in
    # versions, and not in each worker's contributions.
    has_rounds: ClassVar[bool] = False
    # Whether a contribution may be replied when it is folded, before its version is there: its payload then lies in no
    # memory that its worker writes to again.
    replies_before_commit: ClassVar[bool] = False
    # Whether commits may carry scales, so that what a contribution does to the weights is not the script's alone.
    may_scale: bool = False
    # Whether a version may be made of the sum of gradients instead of their mean: a contribution weighs its samples.
    may_sum: ClassVar[bool] = True
    # Modes of one compatible_modes may take over from each other while workers train (`take_over`): what workers do is
    # the same in
    # all, and so is what a contribution counts. Empty: this one from none.
    compatible_modes: ClassVar[str] = ""
    # Options that may be changed while the run goes on (`change`).
    changeable: ClassVar[tuple[str, ...]] = ()
    # What is done to a gradient that comes late before it is folded.
    compensation: Compensation | None = None

    def __init__(self, common: Common, options: Section) -> None:
        self.common = common
        self.options = options
        self.training_steps = common.training_steps  # where nobody has set them, workers may say them later
        self.version = 0  # commits decided
        self.members: dict[int, Member] = {}
        # Number of each rank's newest contribution that counts, kept after it leaves: what makes a repeated
        # one harmless. A rank that came to a running job began at the slowest's.
        self.num_counted: dict[int, int] = {}
        self.out: set[int] = set()  # ranks that take no more training steps, and are not missed
        self.is_stopping = False  # nobody begins another contribution
        self._num_open: dict[int, int] = {}  # of those, by rank, which no version holds yet
        self.has_started = False
        self._ranks: list[int] = []  # of the members, ascending
        self.committed_by: tuple[int, ...] | None = None  # those, at the newest commit; None: others have come or gone
        self._first_number = 0  # of a rank that is new while nobody is live
        # Training steps of each rank beyond those that its contributions, or the rounds, come to: another mode's.
        self._offsets: dict[int, int] = {}
        self._offset = 0  # of a rank that is new
        self._too_many: dict[int, int] = {}  # training steps that a rank's open contribution does not have
        # Of a model that is stepped in parts: contributions of each rank's newest training step; of rounds, one count.
        self.in_step: dict[int, int] = {}
        self._standing = Standing()  # of the live ranks, by those numbers
        self._waiting = Waiting()
        self.paused: set[int] = set()  # live ranks whose replies wait until somebody resumes them
        self._needed = self._num_needed()
        self.generation = 0  # of workers that average among themselves: grows with each group,
        self.group: tuple[int, ...] = ()  # whose members these are
        self.over_generation = 0  # the newest of which a member has gone

    @classmethod
    def told(cls, options: Any) -> str:
        """What people read beside the mode's name, such as `staleness 3`; empty where there is nothing to say."""
        return ""

    # ---- what a snapshot keeps -----------------------------------------------------------

    def num_committed(self) -> dict[int, int]:
        """Like `num_counted`, as far as the newest version holds it."""
        return {rank: self.committed_of(rank) for rank in self.num_counted}

    def committed_of(self, rank: int) -> int:
        return self.num_counted.get(rank, 0) - self._num_open.get(rank, 0)

    def saved_state(self) -> dict[str, Any]:
        """What else this mode has to know to go on from the newest version, as JSON; nothing of what came after it."""
        return {}

    def restore(self, version: int, contributions: Mapping[int, int], state: Mapping[str, Any]) -> None:
        """Go on from a snapshot, with whichever workers join, before any event. `contributions` and `state` are what
        `num_committed` and `saved_state` said at that version."""
        self.version = version
        self.num_counted = dict(contributions)
        self._first_number = min(contributions.values(), default=0)
        self._needed = self._num_needed()

    def committed_steps(self) -> dict[int, int]:
        """Training steps of each rank that the newest version holds."""
        done = {rank: self.steps_done(rank) for rank in self.num_counted}
        if self.has_rounds:
            return done
        return {rank: steps - self._num_open.get(rank, 0) * self.local_steps for rank, steps in done.items()}

    def count_from(self, steps: Mapping[int, int]) -> None:
        """After `restore`: what it has brought comes to these training steps (`committed_steps`), in whatever mode they
        were taken. Rounds are everybody's, and begin at the slowest of those who take more steps."""
        if not self.num_counted:
            return
        fewest = min(self.num_counted, key=lambda rank: self.num_counted[rank])
        least = min(steps.get(rank, 0) for rank in (self.num_counted.keys() - self.out or self.num_counted))
        if self.has_rounds:
            self._offset = least - self.version * self.local_steps
            return
        for rank in self.num_counted:
            self._offsets[rank] = steps.get(rank, least) - self.num_counted[rank] * self.local_steps
        self._offset = self._offsets[fewest]

    def full_state(self) -> dict[str, Any]:
        """Everything that decides, as JSON: for comparing two that were given the same events. Takes time in
        proportion to the members."""
        told = ("common", "options")
        return {name: canonical(value) for name, value in sorted(vars(self).items()) if name not in told}

    # ---- events ------------------------------------------------------------------------

    def joined(self, rank: int, now: float) -> list[Decision]:
        """A worker is ready for weights. A rank that was here before goes on at its own number; one that is
        new to a running job starts at the slowest live one's, so that it neither stalls the others nor
        repeats what they have done. A live rank's older process has left."""
        decisions = self.left(rank, now)
        if rank not in self.num_counted and self.in_step and not self.has_rounds:
            self._offsets[rank] = self.min_steps_done - self.slowest  # contributions are no training steps
        number = self.num_counted.setdefault(rank, self.slowest)
        self.members[rank] = member = Member(rank)
        insort(self._ranks, rank)
        self.committed_by = None
        self.out.discard(rank)
        self._needed = self._num_needed()
        self._standing.add(rank, number)
        self._owe(member, Outcome.START)
        return decisions + self._joined(rank) + self._settle(now)

    def left(self, rank: int, now: float) -> list[Decision]:
        """A worker is gone; whoever waited for it is looked at again at once."""
        if self.members.pop(rank, None) is None:
            return []
        del self._ranks[bisect_left(self._ranks, rank)]
        self.committed_by = None
        self._needed = self._num_needed()
        self._standing.remove(rank, self.num_counted[rank])
        self._waiting.remove(rank)
        self.paused.discard(rank)
        return self._left(rank) + self._settle(now)

    def finished(self, rank: int, now: float) -> list[Decision]:
        """It takes no more training steps: as if it had left, but nobody misses it."""
        self.out.add(rank)
        self._needed = self._num_needed()
        return self.left(rank, now)

    def stopped(self, now: float) -> list[Decision]:
        """Whoever gets its reply from now on has no steps left. A round that is open is closed as any other, so that
        all end at one version; nothing else is waited for."""
        self.is_stopping, self._needed = True, 0
        self.paused.clear()
        self._waiting.ask_all()
        return self._settle(now)

    def disconnected(self, rank: int) -> None:
        """A worker is still a member, but a reply would not reach it: it will ask again."""
        if rank in self.members:
            self.members[rank].is_away = True
            self._waiting.remove(rank)

    def contributed(self, rank: int, contribution: Contribution, now: float) -> list[Decision]:
        """A contribution is staged: fold it, or discard it with a reply or a refusal."""
        if rank in self.members and contribution.id.seq == self.num_counted[rank]:
            # Applied before, and its reply was lost. Where it still waits for its round, so does the repeat.
            self._owe(self.members[rank], Outcome.REPEATED)
            return [Discard(rank), *self._settle(now)]
        if (refusal := self._refusal(rank, contribution.id.seq)) is not None:
            return [Discard(rank), refusal]
        if contribution.counts.part and self.replies_before_commit:
            message = "this mode replies contributions before they are in a version, and cannot step a model in parts"
            return [Discard(rank), Refuse(rank, "BAD_REQUEST", message)]
        member, counted = self.members[rank], self.num_counted[rank]
        num_steps = contribution.counts.num_training_steps
        if num_steps is not None and num_steps < self.local_steps and not contribution.counts.continues_step:
            self._too_many[rank] = self.local_steps - num_steps
        elif self._too_many:
            self._too_many.pop(rank, None)
        decisions = self._take(member, contribution, now)
        member.is_fresh = False
        if contribution.counts.part and not self.has_rounds and self.num_counted[rank] > counted:
            self._stepped_part(rank, contribution.counts.continues_step)
        decisions += self._settle(now)
        return decisions

    def rejected(self, rank: int, now: float) -> list[Decision]:
        """The rank's next contribution cannot be used, and nothing of it is staged. It counts for nothing; before
        the worker computes it anew it waits like anybody else."""
        if (refusal := self._refusal(rank, self.num_counted.get(rank, 0) + 1)) is not None:
            return [refusal]
        self._owe(self.members[rank], Outcome.REJECTED)
        return self._settle(now)

    def change(self, options: Any, now: float) -> list[Decision]:
        """Other values of `changeable` options hold from here on."""
        self.options = options
        self._waiting.ask_all()
        return self._settle(now)

    def take_over(self, before: Policy, now: float) -> list[Decision]:
        """Go on where another of this `compatible_modes` stands, between two events, with all that every mode keeps;
        what was of its
        own rule is forgotten."""
        bare = object.__new__(type(self))
        Policy.__init__(bare, before.common, self.options)
        for name in vars(bare).keys() - {"options"}:
            setattr(self, name, getattr(before, name))
        self._waiting.ask_all()
        return self._settle(now)

    def resume(self, rank: int, now: float) -> list[Decision]:
        """Let a `paused` rank go on."""
        self.paused.discard(rank)
        self._waiting.ask_all()
        return self._settle(now)

    def tick(self, now: float) -> list[Decision]:
        """Look again at whatever depends on time."""
        return self._settle(now)

    # ---- questions ------------------------------------------------------------------------

    @property
    def slowest(self) -> int:
        """Number of the newest contribution that counts of the live worker that has the fewest."""
        least = self._standing.least
        return self._first_number if least is None else least

    def slowest_members(self, most: int) -> list[int]:
        """So many live ranks at most, of those that have the fewest contributions."""
        return self._standing.first(most)

    def lead(self, rank: int) -> int:
        """Contributions of a live worker ahead of the slowest live one."""
        return self.num_counted[rank] - self.slowest

    def next_local_steps(self, rank: int) -> int:
        """Training steps the worker takes before its next contribution; 0 when it is to take no more."""
        if self.is_stopping:
            return 0
        if self.training_steps is None:
            return self.local_steps
        most, left = self.local_steps, self.training_steps - self.steps_done(rank)
        return most if most < left else left

    def told_steps(self, rank: int) -> int | None:
        """Training steps that the worker was told for the contribution it makes, where they differ from rank to rank;
        None: `local_steps`, or as many as were left."""
        return None

    def steps_done(self, rank: int) -> int:
        """Training steps (batches) of the rank that count."""
        most = self.training_steps  # asked thrice at every event: in one go
        steps = self.version if self.has_rounds else self.num_counted.get(rank, 0)  # contributions, or rounds
        steps = steps * self.local_steps + (self._offsets.get(rank, self._offset) if self._offsets else self._offset)
        return steps if most is None or steps < most else most

    def in_step_of(self, rank: int) -> int:
        """Contributions that count of the rank's newest training step, where a step has several (a model in parts)."""
        return self.in_step.get(ROUNDS if self.has_rounds else rank, 0)

    def is_through(self, rank: int) -> bool:
        """It has taken all its training steps. Whether the last one has more parts, only the worker knows."""
        return not (self.next_local_steps(rank) or self.in_step_of(rank))

    @property
    def min_steps_done(self) -> int:
        """Training steps of the slowest live rank; when nobody is live, of the slowest there was. Asked at every
        event: takes the same time however many are live, but for a model in parts."""
        if not self.members or (self.in_step and not self.has_rounds):
            return min(map(self.steps_done, self.members or self.num_counted), default=0)
        rounds = self.version if self.has_rounds else self.slowest
        return self._at_most(self._offset + rounds * self.local_steps)

    def _at_most(self, steps: int) -> int:
        return steps if self.training_steps is None else min(self.training_steps, steps)

    @property
    def local_steps(self) -> int:
        """Training steps in one contribution."""
        return 1

    @property
    def outer(self) -> Outer | None:
        """What the server steps with where deltas are contributed. Its numbers may change from commit to commit."""
        return None

    @property
    def pull_every(self) -> int:
        """Workers fetch weights with every Nth contribution."""
        return 1

    @property
    def fragments(self) -> int:
        """Of the parameters, of which each contribution has one, by turns; 1: it has all."""
        return 1

    @property
    def outstanding(self) -> int:
        """Means of reports that a worker may go on without."""
        return 0

    @property
    def merge(self) -> Merge:
        """What workers do with deltas that are exchanged while they go on (policy.delayed_update)."""
        return Merge()

    @property
    def staleness_bound(self) -> int | None:
        """Lead with which a worker may still go on, in rounds the versions that a gradient may be behind; None where
        nothing bounds it."""
        return None

    def staleness(self, rank: int, contribution: Contribution) -> int:
        """Versions between the weights a contribution was computed on and those it is about to meet."""
        behind = self.version - contribution.base.version
        if self.common.delayed_update and self.kind.worker_steps and rank in self.members:
            # It stands on weights that it contains, or it would undo what is there. All but the first were computed
            # before those came.
            return max(0, behind) + (not self.members[rank].is_fresh)
        return behind if behind > 0 else 0

    @property
    def has_newest_weights(self) -> bool:
        """The server has the weights of the newest version."""
        return True

    def brings(self, rank: int) -> bool:
        """The next report of this worker is to bring weights."""
        return False

    def upload_position(self, rank: int) -> int:
        """How many contributions are folded before this worker's; uploads are staged in this order."""
        return 0

    def waiting(self, now: float, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Why each waiting worker waits, or of these."""
        hold = self._why_hold()
        asked = self._waiting.ranks if ranks is None else [rank for rank in ranks if rank in self._waiting.ranks]
        told: dict[object, str] = {}  # the same sentence is made once
        return {rank: hold or self._why_shut(rank, now, told) for rank in sorted(asked)}

    def _why_shut(self, rank: int, now: float, told: dict[object, str] | None = None) -> str:
        if rank in self.paused:
            return "a resume: somebody paused this worker"
        gate = self._gate(self.members[rank], now)
        if not isinstance(gate, Closed):
            return gate or ""
        told = {} if told is None else told
        return told[gate.why] if gate.why in told else told.setdefault(gate.why, gate.why())

    def waiting_reason(self, now: float) -> str:
        """What everyone waits for, as one sentence; empty when somebody may compute."""
        if (hold := self._why_hold()) is not None:
            return hold
        all_wait = self._ranks and len(self._waiting.ranks) == len(self._ranks)
        return self._why_shut(self._ranks[0], now) if all_wait else ""

    def holders(self) -> tuple[int, ...]:
        """Live ranks that those who wait are waiting for, ascending: in a round who has not contributed, else the
        slowest."""
        ranks = self._ranks if self.has_rounds else self._standing.slowest_ranks
        return tuple(sorted(rank for rank in ranks if rank not in self._waiting.ranks or rank in self.paused))

    # ---- what a mode says -----------------------------------------------------------------

    @abstractmethod
    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        """Decide on the next contribution of a live worker. Call `_count` when it is accepted."""

    def _gate(self, member: Member, now: float) -> Closed | str | None:
        """Why this worker may not compute its next contribution yet; None when it may. A sentence: it is asked again
        after every event, which takes time in proportion to those who wait. `Closed`: when progress has come there."""
        return None

    def _progress(self) -> int:
        """What gates that are `Closed` wait for."""
        return 0

    def _advance(self, now: float) -> list[Decision]:
        """Commits that became possible; called after every event, before anyone gets its reply."""
        return []

    def _joined(self, rank: int) -> list[Decision]:
        return []

    def _left(self, rank: int) -> list[Decision]:
        return []

    # ---- shared moves ---------------------------------------------------------------------

    def _count(self, member: Member) -> None:
        """The member's next contribution is accepted."""
        rank = member.rank
        number = self.num_counted[rank]
        self.num_counted[rank] = number + 1
        self._num_open[rank] = self._num_open.get(rank, 0) + 1
        self._standing.move(rank, number, number + 1)
        self._owe(member, Outcome.APPLIED)

    def _stepped_part(self, key: int, continues: bool) -> None:
        """A contribution of a part counts, or a round of them: one that goes on with a training step is none itself."""
        self.in_step[key] = self.in_step.get(key, 0) + 1 if continues else 1
        if not continues:
            return
        if key == ROUNDS:
            self._offset -= self.local_steps
            self._offsets = {rank: offset - self.local_steps for rank, offset in self._offsets.items()}
        else:
            self._offsets[key] = self._offsets.get(key, self._offset) - self.local_steps

    def _owe(self, member: Member, outcome: Outcome) -> None:
        """The member is to be replied so, as soon as it may go on."""
        member.pending, member.is_away = outcome, False
        self._waiting.add(member.rank)

    def _commit(self, ranks: tuple[int, ...], reason: str, scales: tuple[float, ...] = ()) -> Commit:
        """A version is made of what these ranks have contributed: all that was folded since the one before."""
        self.version += 1
        if self.committed_by is None:
            self.committed_by = tuple(self._ranks)
        for rank in ranks:
            self._num_open[rank] -= 1
        for rank in self._too_many.keys() & set(ranks) if self._too_many else ():
            self._offsets[rank] = self._offsets.get(rank, self._offset) - self._too_many.pop(rank)
        return Commit(ranks, reason, scales, self._momentum_among())

    def _momentum_among(self) -> int:
        """Workers whose lateness stands for some of the optimizer's momentum (`shared/late.py`); 1: none does."""
        return 1

    def _weight(self, contribution: Contribution) -> float:
        return float(contribution.counts.num_samples or 1) if self.common.weighting == "samples" else 1.0

    def _refusal(self, rank: int, number: int) -> Refuse | None:
        """Of a contribution that cannot be this rank's next; None when it can."""
        member = self.members.get(rank)
        if member is None:
            return Refuse(rank, "NOT_JOINED", f"rank {rank} left; it must join again first")
        counted = self.num_counted[rank]
        if number != counted + 1:
            return Refuse(rank, "STEP_GAP", f"rank {rank} sent contribution {number}; the next one is {counted + 1}")
        # What counts for nothing may be sent again by a worker that never heard so. Any other reply that it has
        # not had may stand for a wait.
        sends_again = member.is_away and member.pending in (Outcome.DROPPED, Outcome.REJECTED)
        if member.pending is None or sends_again:
            return None
        reason = f"rank {rank} sent contribution {number}, and has to ask for the reply to {counted} first"
        return Refuse(rank, "STEP_GAP", reason)

    def _num_needed(self) -> int:
        """Live workers without whom nobody may go on, whatever the mode."""
        if self.is_stopping:
            return 0
        to_start = 0 if self.has_started else self.common.num_workers or 0
        return max(1, max(to_start, self.common.min_workers) - len(self.out))

    def _why_hold(self) -> str | None:
        live, num_workers = len(self.members), self.common.num_workers
        if live >= self._needed:
            return None
        if not self.has_started and num_workers is not None and live < num_workers:
            missing = (rank for rank in range(num_workers) if rank not in self.members and rank not in self.out)
            return f"{live} of {num_workers} workers have joined; missing rank {names(missing)}"
        return f"{live} of at least {self.common.min_workers} workers (policy.min_workers) are live"

    def _settle(self, now: float) -> list[Decision]:
        """Commit what can be committed, then reply everyone who may go on."""
        if len(self.members) < self._needed:
            return []
        if not self.has_started:
            self.has_started = True
            self._needed = self._num_needed()
        decisions, waiting = self._advance(now), self._waiting
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
                decisions.append(Reply(rank, member.pending))
                waiting.ranks.discard(rank)
                member.pending = None
            else:
                waiting.shut(rank, gate.until if isinstance(gate, Closed) else None)
        return decisions
