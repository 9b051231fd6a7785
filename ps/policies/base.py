"""The state machine of a mode: events come in, each with the time, and decisions come out (`shared/decisions.py`).

`Policy` (events, and waiting workers with the reasons) extends `Ledger` (abilities of the mode, and counting). A policy
is pure: the same state and event give the same decisions, without a clock, input, output or randomness. A worker waits
until a decision replies to it.

    joined(rank)         a worker has the model and asks for weights to start from
    contributed(rank)    a whole, finite contribution is staged
    rejected(rank)       a contribution cannot be used (NaN); it is not folded and counts for nothing
    disconnected(rank)   a member's connection is lost, and replies do not reach it
    left(rank)           the worker is gone, for any reason
    finished(rank)       the worker takes no more training steps, though it has not taken all
    stopped()            the run ends: no worker computes any more
    tick(now)            time has passed

A mode defines two things (see `single.py`, `ssp.py`, `shared/rounds.py`): the effect of a contribution (`_take`), and
the reason that a worker must wait before its next one (`_gate`).

A contribution gets its reply after its commit, or, with `replies_before_commit` (a buffer), once it is folded. It
counts from `_count` on. When it comes again because its reply was lost, it gets a reply and is not folded. When its
sender dies, the next commit has it nevertheless. A snapshot has the contributions of its version. After a crash the
workers begin where the snapshot has them (`committed`), and compute later contributions again. So nothing is lost,
and nothing counts twice. When the last worker has taken all its training steps, the mode commits what is folded.

The cost of an event does not grow with the number of workers: sums over members are kept up to date.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from pydantic import ValidationError

from ...common.config.option import Section
from ...common.kinds import ContributionKind
from ...common.wire.records import NO_ROW, Contribution, Counts, GroupInfo, Outcome, Row
from .rules import Rule
from .shared.decisions import (
    Closed,
    Commit,
    Common,
    Decision,
    Discard,
    Fold,
    Member,
    Outer,
    Refuse,
    Reply,
    Standing,
    Wait,
    Waiting,
    names,
    plain,
)

# ---- ledger ---------------------------------------------------------------------------------------------

# Abilities of a mode, and the counts of its run: versions, and for each rank one row (`Row`), as counted and as
# committed, for the policy and its snapshots.
#
# A row changes in two places. `Policy._count` adds what a contribution says (of a region, `uncount` takes back
# the samples that the run above did not take), and `_commit` copies the rows of its ranks. A rank
# that is new begins at the training step of the slowest live rank, and one that missed a round goes on with the others.
# A training step is one `step()` of a rank; with local steps a contribution has several of them, and in a model that is
# stepped in parts a training step has several contributions.


class Ledger:
    """The abilities of a mode, which other code queries, and its members with their progress.

    A mode overrides the abilities that differ. `min_steps_done`, `lead` and `steps_done` take constant time."""

    # ---- abilities --------------------------------------------------------------------------

    # The mode's own options: a subclass beside its policy, whose fields `--help` and the configuration show.
    Options: ClassVar[type[Section]] = Section
    # The rules of its histories, beyond those of every mode.
    rules: ClassVar[tuple[type[Rule], ...]] = ()
    kind: ContributionKind = ContributionKind.GRADIENT  # what workers send
    # A commit is one step along the gradients of all, so a robust aggregate may replace their mean
    # (policy.aggregation).
    may_aggregate: ClassVar[bool] = False
    # Workers may compute their next contribution while an exchange is in flight (policy.delayed_update).
    may_delay_update: ClassVar[bool] = False
    staleness_in_flight: ClassVar[int] = 0  # what a contribution in flight counts towards policy.staleness
    # A version is a round of all live workers, who all get it. The run's length is then counted in versions, and not
    # in each worker's contributions.
    has_rounds: ClassVar[bool] = False
    # A step may be made of the contributions of several workers, which must have the same hyperparameters.
    steps_jointly: ClassVar[bool] = False
    # A contribution may get its reply when it is folded, before its version exists. Its payload must then be in memory
    # that its worker does not write to again.
    replies_before_commit: ClassVar[bool] = False
    # Commits may scale the rate, so the script alone does not determine a contribution's effect on the weights.
    may_scale: bool = False
    # A step has a share for each contribution. A skipped one (store.on_nonfinite) counts as zeros, so that the others
    # do not move its share.
    skipped_is_zeros: ClassVar[bool] = False
    # A version may be made of the sum of gradients instead of their mean: a contribution's weight is its samples.
    may_sum: ClassVar[bool] = True
    # Several optimizers of a model may step by turns (session.optimizers).
    may_step_by_turns: ClassVar[bool] = False
    changeable: ClassVar[tuple[str, ...]] = ()  # options that may change while the run goes on (`Policy.change`)
    over_generation: int = 0  # the newest generation of peers of which a member has left
    local_steps: int = 1  # training steps in one contribution
    pull_every: int = 1  # workers fetch weights with every Nth contribution
    fragments: int = 1  # parts of the parameters, of which each contribution has one by turns
    overlap_steps: int = 0  # local steps of a worker during an exchange of deltas; 0: all up to the next contribution
    newest_holders: AbstractSet[int] = frozenset()  # ranks whose workers have the newest weights; the server lacks them

    @classmethod
    def summary(cls, options: Any) -> str:
        """Returns the text beside the mode's name, such as `staleness 3`; empty where there is none."""
        return ""

    @property
    def outer(self) -> Outer | None:
        """The outer optimizer, where workers contribute deltas. It may change from commit to commit."""
        return None

    @property
    def staleness_bound(self) -> int | None:
        """The lead with which a worker may still continue; in rounds, the versions that a gradient may be behind. None:
        no bound."""
        return None

    @property
    def has_newest_weights(self) -> bool:
        """Whether the server has the weights of the newest version."""
        return True

    def weights_uploaded(self) -> None:
        """Note that the server has the newest weights now."""

    def group_info(self, rank: int) -> GroupInfo | None:
        """The group that this worker averages in; None where workers have no peers."""
        return None

    def upload_position(self, rank: int) -> int:
        """Contributions that are folded before this worker's; uploads are staged in this order."""
        return 0

    # ---- state ------------------------------------------------------------------------------

    def __init__(self, common: Common) -> None:
        self.common = common
        self.members: dict[int, Member] = {}
        self.training_steps = common.training_steps  # without a configured number workers may announce it later
        # Contributions of a worker (of peers, their means) that may be in flight while it computes the next one.
        self.num_in_flight = int(common.delayed_update)
        self.version = 0  # commits decided
        # By rank, also after it left, so that a repeated contribution is recognized: all that counts, and what a
        # version has. In modes with rounds a contribution counts with its round: the latter is the rank's `progress`.
        self.rows: dict[int, Row] = {}
        self.committed: dict[int, Row] = {}
        self.progress = self.committed if self.has_rounds else self.rows
        self.is_parted = False  # the script steps the model in parts
        self.num_parts = 0  # the most of the training steps that have ended, without those of long ago
        self._num_shorter = 0  # steps with fewer parts since the newest with so many
        self.finished_ranks: set[int] = set()  # no worker waits for them
        self.is_stopping = False  # no worker begins another contribution
        self.committed_by: tuple[int, ...] | None = None  # members at the newest commit; None: they have changed
        self._ranks: list[int] = []  # of the members, ascending
        self._momentum_among = 1  # workers whose lateness replaces a part of the momentum (`shared/late.py`)
        self._standing = Standing[int]()  # the live ranks in the order of their training steps

    # ---- questions ------------------------------------------------------------------------

    def row(self, rank: int) -> Row:
        """Returns where the rank is in the run."""
        return self.progress.get(rank, NO_ROW)

    def seq(self, rank: int) -> int:
        """Returns the sequence number of the rank's newest contribution that counts."""
        return self.rows.get(rank, NO_ROW).seq

    def steps_done(self, rank: int) -> int:
        """Returns the training steps of the rank that count."""
        return self.progress.get(rank, NO_ROW).steps

    @property
    def min_steps_done(self) -> int:
        """Training steps of the slowest live rank. If none is live, those of the slowest known rank."""
        least = self._standing.least
        return min(map(self.steps_done, self.rows), default=0) if least is None else least

    def lead(self, rank: int) -> int:
        """Returns how many training steps a live worker is ahead of the slowest live worker."""
        return self.steps_done(rank) - self.min_steps_done

    def next_local_steps(self, rank: int) -> int:
        """Returns the training steps that the worker's next contribution covers, or 0 if it takes no more steps."""
        if self.is_stopping:
            return 0
        if self.training_steps is None:
            return self.local_steps
        most, left = self.local_steps, self.training_steps - self.progress.get(rank, NO_ROW).steps
        return most if most < left else left if left > 0 else 0

    def wrong_counts(self, rank: int, counts: Counts) -> str:
        """Returns what is wrong with the counts of a contribution that arrives, as a sentence; empty: nothing."""
        num_steps, most = counts.num_steps, self.local_steps
        if 0 < num_steps <= most:
            return ""
        message = f"rank {rank} contributes {num_steps} training steps and {counts.num_batches} batches"
        if num_steps:
            return f"{message}; at most {most} steps were asked for"
        if counts.part and self.rows.get(rank, NO_ROW).part and not counts.num_batches:
            return ""
        return f"{message}, which is no later part of a training step"

    @property
    def is_within_step(self) -> bool:
        """Whether later parts of the round's training step are to come, or may come: a worker that continues from a
        snapshot of this version would compute them on other weights than these ranks did."""
        parts = [self.rows[rank].part for rank in self._ranks] if self.is_parted and self.has_rounds else []
        return bool(parts) and self.num_parts not in parts

    @property
    def num_active(self) -> int:
        """Live workers that have training steps to take. Those that step a model in parts all count."""
        num = len(self._ranks)
        if self.training_steps is None or self.has_rounds or self.local_steps > 1 or self.is_parted:
            return num
        return num - self._standing.count(self.training_steps)

    def is_through(self, rank: int) -> bool:
        """Whether the rank has taken all its training steps. Only the worker knows whether the last has more parts."""
        return not (self.next_local_steps(rank) or self.row(rank).part)

    # ---- what a snapshot keeps -------------------------------------------------------------

    def saved_state(self) -> dict[str, Any]:
        """Returns the mode's other state at the newest version, as JSON, without anything that came after it."""
        return {}

    def restore(self, version: int, rows: Mapping[int, Row], state: Mapping[str, Any]) -> None:
        """Continue from a snapshot, before any event. `rows` and `state` are what `committed` and `saved_state` were at
        that version, perhaps in another mode. Any workers may join.

        In modes with rounds all ranks go on at the training step of the slowest unfinished rank."""
        self.version = version
        found = dict(rows)
        if self.has_rounds and found:
            least = min(found[rank].steps for rank in found.keys() - self.finished_ranks or found)
            found = {rank: row._replace(steps=least) for rank, row in found.items()}
        self.rows, self.committed = found, dict(found)
        self.progress = self.committed if self.has_rounds else self.rows
        self.is_parted = any(row.part for row in found.values())

    # ---- counting --------------------------------------------------------------------------

    def _admit(self, rank: int) -> None:
        """A worker is live from now on. A new rank begins where the slowest live rank is, or where the run was when the
        last one left, so that it neither stalls the others nor repeats their work."""
        if rank not in self.rows:
            other = next(iter(self._standing.slowest_ranks), None)
            if other is None:
                known = self.rows.keys() - self.finished_ranks or self.rows
                other = max(known, key=lambda known: (self.steps_done(known), -known), default=rank)
            self.rows[rank] = self.committed[rank] = NO_ROW.at(self.row(other))
        self._standing.add(rank, self.steps_done(rank))

    def uncount(self, rank: int, num_samples: int) -> None:
        """The run above did not take the rank's newest contribution: its samples count for nothing."""
        for rows in (self.rows, self.committed):
            if (samples := rows[rank].samples) is not None:
                rows[rank] = rows[rank]._replace(samples=samples - num_samples)

    def _commit(self, ranks: tuple[int, ...], reason: str, lr_scale: float = 1.0) -> Commit:
        """Returns the commit of all that was folded since the version before: everything that counts of these ranks."""
        self.version += 1
        if self.committed_by is None:
            self.committed_by = tuple(self._ranks)
        rows, committed = self.rows, self.committed
        if not self.has_rounds:
            for rank in ranks:
                committed[rank] = rows[rank]
            return Commit(ranks, reason, lr_scale, self._momentum_among)
        if len(ranks) < len(rows):
            # Ranks that missed the round go on where it has led, after as many of their own batches.
            first = max(ranks, key=lambda rank: rows[rank].steps)
            newest, num_batches = rows[first], rows[first].batches - committed[first].batches
            for rank in rows.keys() - set(ranks) - self.finished_ranks:
                if (row := rows[rank]).steps <= newest.steps:
                    rows[rank] = row._replace(steps=newest.steps, batches=row.batches + num_batches, part=newest.part)
        committed.update(rows)
        self._standing.put({rank: rows[rank].steps for rank in self.members})
        return Commit(ranks, reason, lr_scale, self._momentum_among)


# ---- base -----------------------------------------------------------------------------------------------


__all__ = [
    "Closed", "Commit", "Common", "Contribution", "Decision", "Discard", "Fold", "Member", "Outcome", "Outer", "Policy",
    "Refuse", "Reply", "Wait", "names",
]  # fmt: skip


_MOST_SHORTER = 64  # steps with fewer parts, after which no more parts are waited for


class Policy(Ledger, ABC):
    """One mode. Subclasses implement `_take` and, if a worker may have to wait, `_gate`."""

    def __init__(self, common: Common, options: Section) -> None:
        super().__init__(common)
        self.options = options
        self.has_started = False
        self.paused: set[int] = set()  # live ranks whose replies wait for a resume
        self._waiting = Waiting()

    def full_state(self) -> str:
        """The whole state as JSON, to compare two policies after the same events. Takes time in proportion to the
        members."""
        state = {name: value for name, value in vars(self).items() if name not in ("common", "options", "progress")}
        return json.dumps(state, default=plain, sort_keys=True)

    # ---- events ------------------------------------------------------------------------

    def joined(self, rank: int, now: float) -> list[Decision]:
        """Admit a worker that is ready for weights. A known rank continues where it was, a new rank in a running job at
        the slowest live rank's training step. A live rank's older process has left."""
        decisions = self.left(rank, now)
        self._admit(rank)
        self.members[rank] = member = Member(rank)
        insort(self._ranks, rank)
        self.committed_by = None
        self.finished_ranks.discard(rank)
        self._owe(member, Outcome.START)
        return decisions + self._joined(rank) + self._settle(now)

    def left(self, rank: int, now: float) -> list[Decision]:
        """Remove a worker that is gone, and check at once the gates of those that waited for it."""
        if self.members.pop(rank, None) is None:
            return []
        del self._ranks[bisect_left(self._ranks, rank)]
        self.committed_by = None
        self._standing.remove(rank, self.steps_done(rank))
        self._waiting.remove(rank)
        self.paused.discard(rank)
        return self._left(rank) + self._settle(now)

    def finished(self, rank: int, now: float) -> list[Decision]:
        """Note that the worker takes no more training steps: as if it had left, but no other worker waits for it."""
        self.finished_ranks.add(rank)
        return self.left(rank, now)

    def stopped(self, now: float) -> list[Decision]:
        """Stop the run: replies from now on grant no steps. An open round still closes as usual, so that all workers
        end at one version; nothing else is waited for."""
        self.is_stopping = True
        self.paused.clear()
        self._waiting.ask_all()
        return self._settle(now)

    def last_commit(self) -> list[Decision]:
        """Commit what is folded. No worker contributes any more."""
        return []

    def disconnected(self, rank: int) -> None:
        """Note a lost connection: the worker is still a member, but no reply would reach it. It will ask again."""
        if rank in self.members:
            self.members[rank].is_away = True
            self._waiting.remove(rank)

    def contributed(self, rank: int, contribution: Contribution, now: float) -> list[Decision]:
        """Decide on a staged contribution: fold it, or discard it with a reply or a refusal."""
        member, seq, counts = self.members.get(rank), contribution.id.seq, contribution.counts
        if member is not None and seq == self.rows[rank].seq:
            # It was applied before, and its reply was lost. If it still waits for its round, so does the repeat.
            self._owe(member, Outcome.REPEATED)
            return [Discard(rank), *self._settle(now)]
        if (refusal := self._refusal(rank, seq)) is not None:
            return [Discard(rank), refusal]
        assert member is not None
        if counts.part and not self.may_step_by_turns:
            message = "session.optimizers(): several optimizers step by turns only in --mode sync, async and localsgd"
            return [Discard(rank), Refuse(rank, "OPTIMIZER_UNSUPPORTED", message)]
        decisions = self._take(member, contribution, now)
        member.is_fresh = False
        return decisions + self._settle(now)

    def rejected(self, rank: int, now: float) -> list[Decision]:
        """Note that the rank's next contribution cannot be used, and that nothing of it is staged. It does not count.
        The worker computes it anew once its gate is open."""
        if (refusal := self._refusal(rank, self.seq(rank) + 1)) is not None:
            return [refusal]
        self._owe(self.members[rank], Outcome.REJECTED)
        return self._settle(now)

    def change(self, options: Any, now: float) -> list[Decision]:
        """Apply other values of `changeable` options."""
        self.options = options
        self._waiting.ask_all()
        return self._settle(now)

    def options_with(self, values: Mapping[str, Any]) -> Any:
        """Returns the options with other values. Raises ValueError, with the reason as a sentence."""
        try:
            return type(self.options).model_validate({**self.options.model_dump(), **values})
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
            refused = ", ".join(f"{name} cannot be {value!r:.40}" for name, value in values.items())
            raise ValueError(f"{refused}: it {why}") from None

    def resume(self, rank: int, now: float) -> list[Decision]:
        """Resume a `paused` rank."""
        self.paused.discard(rank)
        self._waiting.ask_all()
        return self._settle(now)

    def tick(self, now: float) -> list[Decision]:
        """Check everything that depends on time."""
        return self._settle(now)

    # ---- what a mode says -----------------------------------------------------------------

    @abstractmethod
    def _take(self, member: Member, contribution: Contribution, now: float) -> list[Decision]:
        """Decide on the next contribution of a live worker. Call `_count` when it is accepted."""

    def _gate(self, member: Member, now: float) -> Closed | str | None:
        """Returns the reason that this worker may not compute its next contribution yet; None when it may.

        A gate with a sentence is checked after every event, which takes time in proportion to the waiting workers. A
        gate that is `Closed` is checked when progress reaches its value."""
        return None

    def _progress(self) -> int:
        """The number that `Closed` gates wait for: versions, unless the mode counts something else."""
        return self.version

    def _advance(self, now: float) -> list[Decision]:
        """Returns commits that became possible; called after every event, before any reply."""
        return []

    def _joined(self, rank: int) -> list[Decision]:
        return []

    def _left(self, rank: int) -> list[Decision]:
        return []

    # ---- shared moves ---------------------------------------------------------------------

    def _count(self, member: Member, counts: Counts) -> None:
        """Count the member's next contribution."""
        rank, before = member.rank, self.rows[member.rank]
        self.rows[rank] = row = before.plus(counts)
        if counts.part:
            self.is_parted = True
            if before.part and not counts.continues_step:  # a training step has ended
                self._num_shorter = self._num_shorter + 1 if before.part < self.num_parts else 0
                if self._num_shorter in (0, _MOST_SHORTER):
                    self.num_parts, self._num_shorter = before.part, 0
        if not self.has_rounds:
            self._standing.move(rank, before.steps, row.steps)
        self._owe(member, Outcome.APPLIED)

    def _owe(self, member: Member, outcome: Outcome) -> None:
        """Make this outcome the member's pending reply."""
        member.pending, member.is_away = outcome, False
        self._waiting.ranks.add(member.rank)
        self._waiting.to_ask.add(member.rank)

    def _weight(self, contribution: Contribution) -> float:
        counts = contribution.counts
        return float((counts.num_samples or 1) if self.common.weighting == "samples" else counts.num_workers)

    def staleness(self, rank: int, contribution: Contribution) -> int:
        """Returns the versions between a contribution's base weights and the newest ones."""
        behind = self.version - contribution.base.version
        if self.common.delayed_update and self.kind.worker_steps and rank in self.members:
            # Its base must contain the newest weights, or it would undo them. All but the first were computed before
            # those came.
            return max(0, behind) + (not self.members[rank].is_fresh)
        return behind if behind > 0 else 0

    def _refusal(self, rank: int, number: int) -> Refuse | None:
        """Returns the refusal of a contribution that cannot be this rank's next; None when it can."""
        member = self.members.get(rank)
        if member is None:
            return Refuse(rank, "NOT_JOINED", f"rank {rank} left; it must join again first")
        counted = self.rows[rank].seq
        if number != counted + 1:
            return Refuse(rank, "SEQ_GAP", f"rank {rank} sent contribution {number}; the next one is {counted + 1}")
        # A worker may send a contribution again that does not count, if it never received that reply. Any other
        # missing reply may stand for a wait.
        sends_again = member.is_away and member.pending in (Outcome.DROPPED, Outcome.REJECTED)
        if member.pending is None or sends_again:
            return None
        reason = f"rank {rank} sent contribution {number}, and has to ask for the reply to {counted} first"
        return Refuse(rank, "SEQ_GAP", reason)

    def _settle(self, now: float) -> list[Decision]:
        """Commit all that is possible, then reply to the workers whose gate is open."""
        if len(self.members) < self._needed:
            return []
        self.has_started = True
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

    # ---- gates: which workers wait before they compute again, and why -----------------------------

    @property
    def _needed(self) -> int:
        """The number of live workers that every mode needs before any worker may continue."""
        if self.is_stopping:
            return 0
        to_start = 0 if self.has_started else self.common.num_workers or 0
        return max(1, max(to_start, self.common.min_workers) - len(self.finished_ranks))

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
            missing = sorted(set(range(num_workers)) - self.members.keys() - self.finished_ranks)
            return f"{live} of {num_workers} workers have joined; missing rank {names(missing)}"
        return f"{live} of at least {self.common.min_workers} workers (policy.min_workers) are live"
