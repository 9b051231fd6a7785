"""Contributions taken, and what the policy decides about them carried out on the store.

On the event loop. Tensor work goes to one thread in the order of the decisions, so what the policy has
decided and what the store has done differ only in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...common.config.schema import Config
from ...common.errors import Reason, refusal
from ...common.reporting.log import get_logger
from ..policies.base import Answer, Commit, Contribution, Decision, Discard, Fold, Outcome, Policy, Refuse
from ..shards.alone import StagedPart
from ..tensors.model import Model
from ..tensors.store import Store
from ..tensors.thread import TensorThread
from ..wire.connected import Go, Worker
from .facts import AnswerGiven, ContributionTaken, Fact, Identity, VersionCommitted
from .judgement import Judgement, halted, rejected_too_often
from .membership import replaced
from .roster import Roster

log = get_logger()

# An exchange is over with one of these, and the worker has said how long it took with the next contribution.
_ENDS_EXCHANGE = ("accepted", "dropped", "rejected", "skipped")
_FEW = "too few to leave out so many (policy.aggregation): fewer workers that lie are withstood"


class _Staged(NamedTuple):
    """An accepted contribution, not folded yet, and whose it is. Without a body there is nothing to fold."""

    body: torch.Tensor | None
    identity: Identity


class Contributions:
    """Of all workers of one run. `fail` ends the run with an error."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        roster: Roster,
        model: Model,
        tensors: TensorThread,
        *,
        publish: Callable[[float, Fact], None],
        now: Callable[[], float],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._policy = policy
        self._roster = roster
        self._model = model
        self._tensors = tensors
        self._publish = publish
        self.now = now
        self._fail = fail
        self.is_closed = False  # nothing more is applied
        self.on_commit: Callable[[], object] = lambda: None
        self.elapsed_before_s = 0.0  # up to the snapshot the run goes on from
        self.started_at: float | None = None
        self.ended_at: float | None = None  # of the last contribution
        self._staged: dict[int, _Staged] = {}
        self._rejected: dict[int, str] = {}  # why a rank's next contribution has to be computed again
        self._skipped: dict[int, str] = {}  # why nothing of a rank's last counted contribution is folded
        self._are_few = False  # contributions of the last round
        self._weights: dict[int, float] = {}  # by rank, of what was folded since the last commit
        self._in_mean: list[Identity] = []  # folded since the last commit

    # ---- taking ---------------------------------------------------------------------------

    def check(self, worker: Worker) -> Store:
        """The store to stage for; refuses before a byte of the body is taken."""
        if worker.is_seated and self._model.has_weights:  # by the coordinator, whose word may still be on its way here
            return self._model.store
        self._roster.spoke(worker, self.now())
        if not self._roster.is_current(worker):
            raise replaced(worker.rank, worker.seat.incarnation)
        if worker.state not in ("computing", "uploading") or not self._model.has_weights:
            raise refusal(Reason.NOT_JOINED, f"rank {worker.rank} has no weights to compute on yet")
        return self._model.store

    def uploaded(self, worker: Worker) -> None:
        """All of a contribution has come; it is being looked through."""
        worker.waiting_since = self.now()
        self._roster.spoke(worker, self.now())

    def take(self, worker: Worker, part: StagedPart, now: float) -> None:
        """Take a staged contribution, whole on all shards; what comes of it arrives in the worker's outbox."""
        contribution, body, judgement, told = part
        worker.stats.compute_s += told.compute_s
        worker.stats.transfer_s += told.transfer_s
        worker.stats.skew_max = max(worker.stats.skew_max, told.skew)
        if not self._roster.is_current(worker) or self.is_closed:
            self._model.staging.give_back(body)
            self._note(worker, contribution, "refused")
            return
        if judgement.action in ("reject", "halt"):
            self._model.staging.give_back(body)
            self._note(worker, contribution, "rejected")
            self._reject(worker, contribution, judgement, now)
            return
        if math.isfinite(told.loss):
            worker.stats.loss = told.loss
        worker.state = "waiting"
        worker.staleness = self._policy.staleness(worker.rank, contribution)
        num_counted = self._policy.num_counted.get(worker.rank, 0)
        version = self._policy.version
        decisions = self._policy.contributed(worker.rank, contribution, now)
        is_counted = self._policy.num_counted.get(worker.rank, 0) > num_counted
        is_discarded = any(isinstance(decision, Discard) for decision in decisions)
        if is_discarded or not judgement.is_taken:
            self._model.staging.give_back(body)
        if not is_discarded:
            identity = Identity(worker.rank, worker.seat.incarnation, contribution.number)
            if judgement.is_taken and judgement.scale != 1.0:
                self._tensors.submit(partial(self._model.store.sanity.scale, body, judgement.scale))
            self._staged[worker.rank] = _Staged(body if judgement.is_taken else None, identity)
        outcome = _outcome(decisions, is_counted, contribution.number == num_counted)
        self._note(worker, contribution, "skipped" if is_counted and not judgement.is_taken else outcome, version)
        if is_counted:
            self._note_sanity(worker, contribution, judgement)
            lead = self._policy.lead(worker.rank)
            worker.stats.accepted(worker.staleness, contribution.num_samples, lead, self.now())
            self.ended_at = self.now()
        self.perform(decisions)

    def check_repeat(self, worker: Worker, step: int) -> None:
        """The worker asks again for the answer to this contribution; refuses one that does not count already."""
        self.check(worker)
        counted = self._policy.num_counted.get(worker.rank, 0)
        if step != counted:
            raise refusal(Reason.STEP_GAP, f"rank {worker.rank} repeats step {step}; the last that counts is {counted}")

    def repeat(self, worker: Worker, now: float) -> None:
        """It has asked all shards: answer it again."""
        worker.state, worker.waiting_since = "waiting", self.now()
        repeated = Contribution(self._policy.num_counted.get(worker.rank, 0), self._policy.version)
        self._note(worker, repeated, "repeated")
        self.perform(self._policy.contributed(worker.rank, repeated, now))

    def _note(self, worker: Worker, contribution: Contribution, outcome: str, version: int | None = None) -> None:
        rank, incarnation = worker.rank, worker.seat.incarnation
        exchange_s = worker.stats.exchange_s(incarnation) if outcome in _ENDS_EXCHANGE else -1.0
        taken = ContributionTaken(
            Identity(rank, incarnation, contribution.number),
            contribution.base_version,
            self._policy.version if version is None else version,
            outcome,
            contribution.num_samples,
            exchange_s,
        )
        self._publish(self.now(), taken)

    def _note_sanity(self, worker: Worker, contribution: Contribution, judgement: Judgement) -> None:
        """A contribution counts: remember what was not sound about it."""
        self._skipped.pop(worker.rank, None)
        if judgement.is_clipped:
            worker.stats.clipped += 1
            log.debug("clipped", rank=worker.rank, step=contribution.number, reason=judgement.what)
        elif not judgement.is_taken:
            worker.stats.skipped += 1
            self._skipped[worker.rank] = f"{judgement.what} ({judgement.limit}): counted as a step, nothing folded"
            log.warning("skipped", rank=worker.rank, step=contribution.number, reason=judgement.what)

    def _reject(self, worker: Worker, contribution: Contribution, judgement: Judgement, now: float) -> None:
        """Count it, answer with fresh weights when the mode lets the worker go on, and end the run when there are
        too many, or at once."""
        limit, version = self._config.store.max_nonfinite, self._policy.version
        worker.stats.rejected += 1
        worker.stats.rejected_in_a_row += 1
        row = worker.stats.rejected_in_a_row
        log.warning("rejected", rank=worker.rank, reason=judgement.what, in_a_row=row, limit=limit)
        if judgement.action == "halt":
            self._fail(halted(worker.rank, contribution.number, version, judgement))
        elif row >= limit:
            self._fail(rejected_too_often(worker.rank, row, limit, version, judgement))
        else:
            self._rejected[worker.rank] = f"{judgement.what}: nothing folded"
            worker.state = "waiting"
            self.perform(self._policy.rejected(worker.rank, now))

    # ---- carrying out decisions -----------------------------------------------------------

    def perform(self, decisions: list[Decision]) -> None:
        has_committed = False
        for decision in decisions:
            match decision:
                case Fold(rank, weight):
                    self._fold(rank, weight)
                case Commit(ranks, reason) as commit:
                    log.debug("commit", version=self._policy.version, ranks=ranks, reason=reason)
                    self._commit(ranks, commit.lr_scale(self._weights))
                    has_committed = True
                case Answer(rank, outcome, reason):
                    self._answer(self._roster.workers[rank], outcome, reason)
                case Refuse(rank, kind, reason):
                    if rank in self._roster.workers:
                        self._roster.workers[rank].refuse(refusal(Reason[kind], reason))
        if has_committed:
            self.on_commit()
        if self._model.has_weights:
            self._model.staging.look_again()  # also without decisions: who left may have been folded before others

    def _answer(self, worker: Worker, outcome: Outcome, reason: str) -> None:
        name = outcome.name
        if outcome is Outcome.REJECTED:
            reason = self._rejected.pop(worker.rank, reason)
        if outcome in (Outcome.APPLIED, Outcome.REPEATED) and worker.rank in self._skipped:
            name, reason = "REJECTED", self._skipped[worker.rank]  # it is not to build on what it sent
        if worker.gets_weights(name):
            self._go(worker, name, reason)  # the last of its weights come when all is done
        else:
            self._tensors.then(partial(self._go, worker, name, reason))

    def _warn_of_few(self, count: int, fewest: int) -> None:
        """Say it once, and again when there were enough in between."""
        if count >= fewest:
            self._are_few = False
        elif count and not self._are_few:
            self._are_few = True
            log.warning("few_contributions", count=count, fewest=fewest, meaning=_FEW)

    def _fold(self, rank: int, weight: float) -> None:
        store, staging, (body, identity) = self._model.store, self._model.staging, self._staged.pop(rank)
        if body is None:
            return
        self._in_mean.append(identity)
        self._weights[rank] = weight

        def folded(reusable: list[torch.Tensor]) -> None:
            if not any(one is body for one in reusable):
                staging.donate(body)
            for one in reusable:
                staging.give_back(one)

        may_keep = not staging.is_own(body)
        self._tensors.submit(partial(store.fold, body, weight, rank, may_keep), folded)

    def _commit(self, ranks: tuple[int, ...], lr_scale: float) -> None:
        store, publisher = self._model.store, self._model.publisher
        live = sorted(self._policy.members)
        # In a round everyone steps under one schedule; the lowest rank's word counts.
        told = [self._roster.workers[rank].hyperparameters for rank in sorted(ranks) if rank in self._roster.workers]
        hyperparameters = next((h for h in told if h is not None), None)
        lowest = live[0] if live else 0
        publication = publisher.next(publisher.latest.version + 1)
        self._warn_of_few(len(self._in_mean), store.aggregator.fewest)
        self._publish(self.now(), VersionCommitted(publication.version, tuple(self._in_mean), tuple(live)))
        self._in_mean, self._weights = [], {}
        target, made = publication.segment.body, publication.made
        self._tensors.submit(
            lambda: store.commit(len(live), lowest, hyperparameters, target, made, lr_scale),
            self._model.staging.reclaim,
        )

    def _go(self, worker: Worker, outcome: str, reason: str) -> None:
        """The worker may have its answer, with the weights that everything decided before leads to."""
        if worker.is_away:
            return  # it asks again when it is back
        now = self.now()
        if outcome == "DROPPED":
            worker.stats.dropped += 1
        if outcome == "START" and self.started_at is None:
            self.started_at = now
            log.info("training_started", workers=len(self._policy.members), mode=self._config.run.mode)
        held_s = now - worker.waiting_since if worker.waiting_since is not None else 0.0
        if outcome != "START":
            worker.stats.wait_s += held_s
        worker.waiting_since = None
        worker.state = "computing"
        version = self._model.publisher.latest.version
        worker.outbox.put_nowait(Go(outcome, version, worker.staleness, held_s, reason))
        worker.staleness = 0
        number = self._policy.num_counted.get(worker.rank, 0)
        self._publish(now, AnswerGiven(worker.rank, worker.seat.incarnation, number, version, outcome))


def _outcome(decisions: list[Decision], is_counted: bool, is_repeated: bool) -> str:
    """What became of a contribution, as the history has it."""
    if is_counted:
        return "accepted"
    if any(isinstance(decision, Refuse) for decision in decisions):
        return "refused"
    return "repeated" if is_repeated else "dropped"
