"""What becomes of contributions: taken into the policy, whose decisions become effects.

A contribution belongs to whoever sent it, with the hyperparameters that travelled with it: also when its worker dies
or is replaced before it is folded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...common.errors import Reason, refusal
from ..policies.base import Answer, Commit, Contribution, Decision, Fold, Outcome, Outer, Policy, Refuse
from . import effects
from .drawn import Data, Drawn
from .effects import Effect, Log
from .events import Contributed, Identity
from .judgement import halted, rejected_too_often
from .roster import Roster, Worker
from .stats import WorkerStats

# An exchange is over with one of these, and the worker has said how long it took with the next contribution.
_ENDS_EXCHANGE = ("accepted", "dropped", "rejected", "skipped")


@dataclass(slots=True)
class Held:
    """A contribution that counts and is not in a version yet; it gets its weight when it is folded."""

    identity: Identity
    hyperparameters: tuple[dict[str, Any], ...] | None
    num_batches: int  # drawn for it
    num_steps: int  # training steps in it
    num_contributed: int  # by its process: how far the schedule is that they come from
    is_folded: bool  # False: it counts as an empty one
    scale: float
    weight: float = 0.0


class Contributions:
    """Of all workers of one run."""

    def __init__(self, policy: Policy, roster: Roster, mode: str, max_rejected: int) -> None:
        self._policy = policy
        self._roster = roster
        self._mode = mode
        self._max_rejected = max_rejected
        self._held: dict[int, Held] = {}  # by rank, until the policy folds it
        self.drawn = Drawn()
        self._data = Data()
        self._in_mean: list[Held] = []  # since the newest commit; several of one rank where it is answered before that
        self._empty: dict[int, str] = {}  # by rank: why nothing of its newest counted contribution is folded
        self._rejected_for: dict[int, str] = {}  # by rank: why its newest contribution did not count
        self._outer: Outer | None = None  # that the newest commit was made with
        self._elapsed_before_s = 0.0  # up to the snapshot the run goes on from
        self._started_at: float | None = None
        self._ended_at: float | None = None  # of the newest contribution

    # ---- taking ---------------------------------------------------------------------------

    def taken(self, worker: Worker, event: Contributed) -> Iterator[Effect]:
        """A contribution of a live worker, whole on all shards."""
        rank, policy, stats = worker.rank, self._policy, self._roster.stats[worker.rank]
        stats.compute_s += event.compute_s
        stats.transfer_s += event.transfer_s
        worker.waiting_since, worker.wants_weights = event.at - event.looked_s, event.wants_weights
        worker.evaluates = event.evaluates
        if event.hyperparameters is not None:
            worker.hyperparameters = event.hyperparameters
        if event.judgement.action in ("reject", "halt"):
            yield from self._rejected(stats, event)
            return
        if math.isfinite(event.loss):
            stats.loss = event.loss
        if event.data is not None and not worker.num_contributed:
            yield from self._data.told(rank, event.base_version, *event.data)
        contribution = Contribution(event.number, event.base_version, event.num_samples, event.num_steps, event.part)
        worker.staleness = policy.staleness(rank, contribution)
        num_counted, version = policy.num_counted[rank], policy.version
        decisions = policy.contributed(rank, contribution, event.at)
        if policy.num_counted[rank] > num_counted:
            yield self._note(event, "accepted" if event.judgement.is_taken else "skipped", version)
            yield from self._counted(worker, stats, event)
        else:
            outcome = "repeated" if event.number == num_counted else "dropped"
            if any(isinstance(decision, Refuse) for decision in decisions):
                outcome = "refused"
            yield self._note(event, outcome, version)
            yield effects.Discard(event.identity)
        yield from self.perform(decisions, event.at)

    def refuse(self, event: Contributed) -> Iterator[Effect]:
        """It comes from nobody who may contribute now."""
        yield effects.Discard(event.identity)
        yield self._note(event, "refused", self._policy.version)

    def _counted(self, worker: Worker, stats: WorkerStats, event: Contributed) -> Iterator[Effect]:
        """Hold it until it is folded, and say what was not sound about it."""
        rank, found = worker.rank, event.judgement
        worker.num_contributed += 1
        num_steps = self._policy.local_steps if event.num_steps is None else event.num_steps
        num_batches = num_steps if event.num_batches is None else event.num_batches
        told = (worker.hyperparameters, num_batches, num_steps, worker.num_contributed)
        self._held[rank] = Held(event.identity, *told, found.is_taken, found.scale)
        stats.accepted(worker.staleness, event.num_samples, self._policy.lead(rank), event.at)
        self._ended_at = event.at
        self._empty.pop(rank, None)
        if found.is_clipped:
            stats.clipped += 1
            yield Log("debug", "clipped", {"rank": rank, "step": event.number, "reason": found.what})
        if found.is_taken:
            yield effects.Keep(event.identity)
        else:
            stats.skipped += 1
            self._empty[rank] = f"{found.what} ({found.limit}): counted as a contribution, nothing folded"
            yield Log("warning", "skipped", {"rank": rank, "step": event.number, "reason": found.what})
            yield effects.Discard(event.identity, is_counted=True)

    def _rejected(self, stats: WorkerStats, event: Contributed) -> Iterator[Effect]:
        """Answered with fresh weights when the mode allows another attempt; the end of the run when it goes on."""
        rank, version, found = event.rank, self._policy.version, event.judgement
        yield effects.Discard(event.identity)
        yield self._note(event, "rejected", version)
        stats.rejected += 1
        stats.rejected_in_a_row += 1
        row, limit = stats.rejected_in_a_row, self._max_rejected
        yield Log("warning", "rejected", {"rank": rank, "reason": found.what, "in_a_row": row, "limit": limit})
        if found.action == "halt":
            yield effects.End(halted(rank, event.number, version, found))
        elif row >= limit:
            yield effects.End(rejected_too_often(rank, row, limit, version, found))
        else:
            self._rejected_for[rank] = f"{found.what}: nothing folded"
            yield from self.perform(self._policy.rejected(rank, event.at), event.at)

    def repeated(self, worker: Worker, number: int, at: float) -> Iterator[Effect]:
        """It asks again for the answer to a contribution that counts."""
        worker.waiting_since = at
        version = self._policy.version
        decisions = self._policy.contributed(worker.rank, Contribution(number, version), at)
        identity = Identity(worker.rank, worker.incarnation, number)
        yield effects.ContributionTaken(identity, version, version, "repeated", 0, -1.0)
        yield from self.perform(decisions, at)

    def _note(self, event: Contributed, outcome: str, version: int) -> Effect:
        is_over = outcome in _ENDS_EXCHANGE
        exchange_s = self._roster.stats[event.rank].exchange_s(event.incarnation) if is_over else -1.0
        told = (event.base_version, version, outcome, event.num_samples, exchange_s)
        work = (event.compute_s, event.transfer_s, event.num_steps, event.part, event.steps)
        return effects.ContributionTaken(event.identity, *told, *work)

    # ---- decisions ------------------------------------------------------------------------

    def perform(self, decisions: list[Decision], at: float) -> Iterator[Effect]:
        """The policy's decisions as effects. What is to be discarded is what did not count: it has been."""
        for decision in decisions:
            match decision:
                case Fold(rank, weight):
                    held = self._held.pop(rank)
                    held.weight = weight
                    self._in_mean.append(held)
                    if held.is_folded:
                        yield effects.Fold(held.identity, weight, held.scale)
                case Commit():
                    yield from self._commit(decision)
                case Answer(rank, outcome, reason):
                    yield from self._answer(rank, outcome, reason, at)
                case Refuse(rank, kind, reason):
                    worker = self._roster.workers.get(rank)
                    if worker is not None:
                        yield effects.Refuse(rank, worker.incarnation, refusal(Reason[kind], reason))

    def _commit(self, decision: Commit) -> Iterator[Effect]:
        in_mean, self._in_mean = self._in_mean, []
        num_batches, num_steps = Counter[int](), Counter[int]()
        for held in in_mean:
            num_batches[held.identity.rank] += held.num_batches
            num_steps[held.identity.rank] += held.num_steps
        for rank, num in num_batches.items():
            self.drawn.committed(rank, num, num_steps[rank], self._policy.steps_done(rank))
        folded = tuple(held.identity for held in in_mean if held.is_folded)
        weights = ((held.identity.rank, held.weight if held.is_folded else 0.0) for held in in_mean)
        # In a round everyone steps under one schedule. The word of the process that has contributed most counts, of
        # several the lowest rank's: who was replaced has begun its schedule anew, and does not take the run back.
        told = [held for held in in_mean if held.hyperparameters is not None]
        newest = max(told, key=lambda held: (held.num_contributed, -held.identity.rank), default=None)
        hyperparameters = newest.hyperparameters if newest is not None else None
        if (outer := self._policy.outer) is not None:
            hyperparameters = (dict(outer.arguments),)
            if outer != self._outer:
                self._outer = outer
                yield Log("info", "outer_optimizer", {**outer.arguments, "name": outer.name, "because": outer.reason})
        yield effects.Commit(
            self._policy.version,
            folded,
            tuple(sorted(self._policy.members)),
            hyperparameters,
            decision.lr_scale(weights),
            decision.reason,
        )

    def _answer(self, rank: int, outcome: Outcome, reason: str, at: float) -> Iterator[Effect]:
        worker = self._roster.workers.get(rank)
        if worker is None or worker.is_away:
            return  # it asks again when it is back
        name, stats, policy = outcome.name, self._roster.stats[rank], self._policy
        if outcome in (Outcome.APPLIED, Outcome.REPEATED) and rank in self._empty:
            name, reason = "REJECTED", self._empty[rank]  # it is not to build on what it sent
        elif name == "REJECTED":
            reason = self._rejected_for.pop(rank, reason)
        if name == "DROPPED":
            stats.dropped += 1
        held_s = at - worker.waiting_since if worker.waiting_since is not None else 0.0
        if name != "START":
            stats.wait_s += held_s
        elif self._started_at is None:
            self._started_at = at
            yield Log("info", "training_started", {"workers": len(policy.members), "mode": self._mode})
        num_workers, index = self._division(rank)
        in_step = policy.in_step_of(rank) if name == "START" else 0
        yield effects.Answer(
            rank, worker.incarnation, name, reason, policy.num_counted.get(rank, 0), policy.version,
            has_weights=worker.wants_weights or name != "APPLIED",
            next_local_steps=policy.next_local_steps(rank), training_steps=policy.steps_done(rank),
            staleness=worker.staleness, held_s=held_s, num_workers=num_workers, worker_index=index,
            num_batches=self.drawn.place(rank, policy.steps_done(rank)) if name == "START" else None, in_step=in_step,
            steps=policy.training_steps, has_spare=bool(self._roster.spares), is_evaluated=worker.evaluates,
        )  # fmt: skip
        worker.waiting_since, worker.staleness, worker.evaluates = None, 0, False

    def _division(self, rank: int) -> tuple[int, int]:
        """(num_workers, index): how the data is divided for this rank."""
        if self._roster.num_workers is not None:
            return self._roster.num_workers, rank
        ranks = sorted(self._roster.workers)
        return len(ranks), ranks.index(rank)

    # ---- for the summary, and what survives -------------------------------------------------

    def elapsed_s(self, at: float, is_over: bool) -> float:
        """Seconds from the first answer to the newest contribution, or to now while the run goes on."""
        if self._started_at is None:
            return self._elapsed_before_s
        end = self._ended_at if is_over and self._ended_at is not None else at
        return self._elapsed_before_s + end - self._started_at

    def restore(self, training: dict[str, Any]) -> None:
        """Sums of a snapshot. What is not there, or not what it should be, is counted from zero."""
        elapsed_s, stats = training.get("elapsed_s"), training.get("stats")
        if isinstance(elapsed_s, int | float):
            self._elapsed_before_s = float(elapsed_s)
        self.drawn.restore(training.get("batches"))
        for rank, values in stats.items() if isinstance(stats, dict) else ():
            if rank.isdecimal() and isinstance(values, dict):
                self._roster.stats[int(rank)] = WorkerStats.restored(int(rank), values)
