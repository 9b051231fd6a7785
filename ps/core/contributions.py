"""Passes contributions to the policy and turns the policy's decisions into effects.

A contribution keeps its sender's rank and hyperparameters, even when that worker dies or is replaced before the
contribution is folded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...common.errors import Reason, refusal
from ...common.tensors.judgement import SOUND, halted, rejected_too_often
from ...common.wire import records
from ...common.wire.records import COUNTED, Contribution, Outcome
from ..policies.base import Commit, Decision, Discard, Fold, Outer, Policy, Refuse, Reply, Wait
from ..policies.shared.late import momentum_left
from . import effects
from .counting import MOST_BINS, Data, Groups, Rates, WorkerStats, difference_of, first_difference, restored_bins
from .effects import Effect, Log
from .events import Contributed
from .roster import Roster, Worker
from .snapshot_rhythm import Rhythm

# These outcomes end an exchange. The worker reports its duration with the next contribution.
_ENDS_EXCHANGE = ("accepted", "dropped", "rejected", "skipped")


_REASONS = {
    Outcome.START: "start from these weights",
    Outcome.APPLIED: "applied",
    Outcome.REPEATED: "repeated: nothing folded",
    Outcome.DROPPED: "not of the open round: nothing folded",
    Outcome.REJECTED: "rejected: nothing folded",
}
_ASKED_FOR = 2  # replies
_NUM_NAMED = 8  # ranks in one warning
_LESS_MOMENTUM = "late gradients act as momentum themselves; policy.late_momentum=false uses the configured momentum"


@dataclass(slots=True)
class Pending:
    """A contribution that counts and that no version has yet. Folding gives it its weight."""

    rank: int
    contribution: Contribution
    hyperparameters: Groups | None  # the newest of its worker
    is_taken: bool  # False: the server has skipped it
    scale: float  # multiplies its payload
    staleness: int
    new_samples: int | None
    weight: float = 0.0


class Contributions:
    """The contributions of all workers of one run."""

    def __init__(self, policy: Policy, roster: Roster, rhythm: Rhythm, mode: str, max_rejected: int) -> None:
        self.policy, self._roster, self._rhythm = policy, roster, rhythm
        self._mode, self._max_rejected = mode, max_rejected
        self._pending: dict[int, Pending] = {}  # by rank, until the policy folds it
        # Hyperparameters of what counts since the newest commit, with the rank, by the steps of the rank and of its
        # process: one that replaced another may have begun its schedule anew, one whose scaler skipped a step is ahead.
        self._schedules: dict[tuple[int, int], tuple[int, Groups]] = {}
        self.data, self.rates = Data(), Rates()
        # Contributions whose decision is pending, by rank, with the version at arrival.
        self._undecided: dict[int, tuple[Worker, Contributed, int]] = {}
        # Since the newest commit; several of one rank where the mode replies before that.
        self._in_mean: list[Pending] = []
        self._empty: dict[int, str] = {}  # by rank: why nothing of its newest counted contribution is folded
        self._rejected_for: dict[int, str] = {}  # by rank: why its newest contribution did not count
        self._outer: Outer | None = None  # the outer optimizer of the newest commit
        self.lr_scale = 1.0  # multiplies the learning rate of every commit; set by a control
        self.staleness: Counter[int] = Counter()  # contributions that count, by versions behind
        self._clip_norms_differed = self._schedules_differed = False  # whether the warning was logged
        self._momentum_among = 1  # of the newest commit with hyperparameters
        self._elapsed_before_s = 0.0  # up to the snapshot the run goes on from
        self._started_at: float | None = None
        self._ended_at: float | None = None  # of the newest contribution
        self._begun_steps = 0  # of the slowest, when training began
        self._done = 0, 0  # samples and training steps of all, in this process
        # When all had taken their first training step; then the slowest's steps, and samples and steps of all.
        self._first: tuple[float, int, int, int] | None = None

    # ---- taking ---------------------------------------------------------------------------

    def taken(self, worker: Worker, event: Contributed) -> list[Effect]:
        """Decides about a contribution that is complete on all shards: it counts, or is rejected, dropped or refused.

        Returns the effects. The sender is a live worker. `_rejected` handles NaN and gradients that are too large."""
        rank, policy, stats, at = worker.rank, self.policy, self._roster.stats[worker.rank], event.at
        self._undecided.pop(rank, None)  # of a connection that was lost, or of a process that has gone
        contribution = event.contribution
        training, residual = contribution.training, contribution.residual
        stats.compute_s += contribution.timing.compute_s
        stats.transfer_s += contribution.timing.transfer_s
        if residual.norm or stats.residual or residual.num_lost:
            stats.note_residual(residual)
        worker.waiting_since, worker.wants_weights = at - event.looked_s, training.wants_weights
        worker.wants_exact = training.wants_exact
        if contribution.counts.num_workers > 1 or self._roster.sizes:
            self._roster.stands_for(rank, contribution.counts.num_workers)
        if training.hyperparameters:
            worker.hyperparameters = training.hyperparameters
        if event.judgement is not SOUND and event.judgement.action in ("reject", "halt"):
            return list(self._rejected(stats, event))
        if not (policy.kind.has_payload or event.judgement.is_taken):  # of a skipped upload only the completion counts
            contribution = replace(contribution, kind=policy.kind)
            event = replace(event, contribution=contribution)
        found: list[Effect] = []
        if math.isfinite(training.loss):
            stats.loss = training.loss
        if (first := contribution.first) is not None:
            if (other_data := self.data.differs(rank, first.num_samples)) is not None:
                return [*self.refuse(event), effects.Refuse(rank, worker.incarnation, other_data)]
            found += self.data.record(rank, contribution.base.version, first.digest)
        groups = worker.hyperparameters if policy.steps_jointly and training.iteration else None
        at_step = policy.progress[rank].steps, training.iteration
        known = self._schedules.get(at_step)
        if groups and known and (differ := difference_of(rank, groups, *known)) is not None:
            return [*self.refuse(event), effects.Refuse(rank, worker.incarnation, differ)]
        worker.staleness = policy.staleness(rank, contribution)
        num_counted, version = policy.rows[rank].seq, policy.version
        decisions = policy.contributed(rank, contribution, at)
        if decisions and isinstance(decisions[0], Wait):
            self._undecided[rank] = worker, event, version
        elif policy.rows[rank].seq > num_counted:
            self._counted(worker, stats, event, version, found)
            if groups is not None:
                self._schedules.setdefault(at_step, (rank, groups))
        else:
            outcome = "repeated" if contribution.id.seq == num_counted else "dropped"
            if any(isinstance(decision, Refuse) for decision in decisions):
                outcome = "refused"
            found.append(self._note(event, outcome, version))
        return found + self.perform(decisions, at)

    def refuse(self, event: Contributed) -> list[Effect]:
        """Discard a contribution whose sender may not contribute now."""
        return [self._note(event, "refused", self.policy.version)]

    def _counted(
        self, worker: Worker, stats: WorkerStats, event: Contributed, version: int, found: list[Effect]
    ) -> None:
        """Keep a contribution that counts until it is folded, and log a problem that was found in it. It arrived at
        `version`."""
        rank, judged, contribution, policy = worker.rank, event.judgement, event.contribution, self.policy
        counts, groups, staleness = contribution.counts, worker.hyperparameters, worker.staleness
        is_taken, new_samples, least = judged is SOUND or judged.is_taken, counts.new_samples, policy.min_steps_done
        found.append(self._note(event, "accepted" if is_taken else "skipped", version))
        self._pending[rank] = Pending(rank, contribution, groups, is_taken, judged.scale, staleness, new_samples)
        samples, steps = self._done
        self._done = samples + (new_samples or 0), steps + counts.num_steps
        if groups is not None and groups is not self.rates.newest.get(rank):
            self.rates.counted(rank, groups, contribution.first.rates if contribution.first is not None else ())
        stats.accepted(staleness, new_samples, policy.progress[rank].steps - least, event.at)
        self.staleness[min(MOST_BINS, staleness)] += 1
        self._ended_at = event.at
        if self._first is None and least > self._begun_steps:
            self._first = event.at, least, self._done[0], self._done[1]
        if self._empty:
            self._empty.pop(rank, None)
        if judged.is_clipped:
            stats.clipped += 1
            found.append(Log("debug", "clipped", {"rank": rank, "seq": contribution.id.seq, "reason": judged.problem}))
        if not is_taken:
            stats.skipped += 1
            self._empty[rank] = f"{judged.problem} ({judged.limit}): counted as a contribution, nothing folded"
            fields = {"rank": rank, "seq": contribution.id.seq, "reason": judged.problem}
            found.append(Log("warning", "skipped", fields))

    def _rejected(self, stats: WorkerStats, event: Contributed) -> Iterator[Effect]:
        """Ask the mode for another attempt with fresh weights; too many rejections in a row end the run."""
        rank, version, found = event.rank, self.policy.version, event.judgement
        yield self._note(event, "rejected", version)
        stats.rejected += 1
        stats.rejected_in_a_row += 1
        row, limit = stats.rejected_in_a_row, self._max_rejected
        yield Log("warning", "rejected", {"rank": rank, "reason": found.problem, "in_a_row": row, "limit": limit})
        if found.action == "halt":
            yield effects.End(halted(rank, event.contribution.id.seq, version, found))
        elif row >= limit:
            yield effects.End(rejected_too_often(rank, row, limit, version, found))
        else:
            self._rejected_for[rank] = f"{found.problem}: nothing folded"
            yield from self.perform(self.policy.rejected(rank, event.at), event.at)

    def _note(self, event: Contributed, outcome: str, version: int) -> Effect:
        rank, incarnation, _ = event.contribution.id
        exchange_s = self._roster.stats[rank].exchange_s(incarnation) if outcome in _ENDS_EXCHANGE else -1.0
        return effects.ContributionTaken(event.contribution, version, outcome, exchange_s, event.traffic)

    # ---- decisions ------------------------------------------------------------------------

    def perform(self, decisions: list[Decision], at: float) -> list[Effect]:
        """Returns the policy's decisions as effects. `taken` has already discarded what does not count."""
        found: list[Effect] = []
        for decision in decisions:
            if isinstance(decision, Reply):
                self._reply(decision, at, found)
            elif isinstance(decision, Fold):
                if self._undecided and decision.rank in self._undecided:
                    worker, event, version = self._undecided.pop(decision.rank)
                    self._counted(worker, self._roster.stats[worker.rank], event, version, found)
                pending = self._pending.pop(decision.rank)
                pending.weight = decision.weight
                self._in_mean.append(pending)
                if pending.is_taken and pending.contribution.kind.has_payload:
                    found.append(effects.Fold(pending.contribution.id, pending.weight, pending.scale))
            elif isinstance(decision, Commit):
                self._commit(decision, found)
            elif isinstance(decision, Discard) and decision.rank in self._undecided:
                _, event, version = self._undecided.pop(decision.rank)
                found.append(self._note(event, "dropped", version))
            elif isinstance(decision, Refuse):
                refused = self._roster.workers.get(decision.rank)
                if refused is not None:
                    error = refusal(Reason[decision.kind], decision.reason)
                    found.append(effects.Refuse(decision.rank, refused.incarnation, error))
        return found

    def _commit(self, decision: Commit, found: list[Effect]) -> None:
        in_mean, self._in_mean, policy = self._in_mean, [], self.policy
        self._rhythm.has_committed = True
        self._schedules.clear()
        taken, num_samples, weight, total = list[records.ContributionId](), 0, 0.0, 0.0
        # The hyperparameters of the process with the most steps, then of the lowest rank. A replacement may have begun
        # its schedule anew, and must not set the run back.
        hyperparameters: Groups | None = None
        clip_norm, iteration, lowest = 0.0, 0, 0
        for pending in in_mean:
            total += pending.weight
            if pending.is_taken:
                num_samples += 1 if pending.new_samples is None else pending.new_samples
                weight += pending.weight
                taken.append(pending.contribution.id)
            training = pending.contribution.training
            is_newer = (training.iteration, -pending.rank) > (iteration, -lowest)
            if pending.hyperparameters is not None and (hyperparameters is None or is_newer):
                hyperparameters, lowest = pending.hyperparameters, pending.rank
                clip_norm, iteration = training.clip_norm, training.iteration
        if len(in_mean) > 1 and policy.has_rounds and policy.kind.holds_gradients:
            self._compare(in_mean, hyperparameters or (), clip_norm, found)
        part = weight / total if policy.skipped_is_zeros and total else 1.0
        if policy.kind.holds_differences and (outer := policy.outer) is not None:
            hyperparameters = ({**outer.arguments, **(decision.numbers or {})},)
            if decision.numbers:
                hyperparameters[0]["share"] *= part
            if outer != self._outer:
                self._outer = outer
                told_of = {**outer.arguments, "name": outer.name, "because": outer.reason}
                found.append(Log("info", "outer_optimizer", told_of))
        if hyperparameters is not None and decision.momentum_among != self._momentum_among:
            self._momentum_among = decision.momentum_among
            configured = max(group.get("momentum", 0.0) for group in hyperparameters)
            if configured:
                fields = {"configured": configured, "used": round(momentum_left(configured, self._momentum_among), 4)}
                fields |= {"workers": self._momentum_among, "meaning": _LESS_MOMENTUM}
                found.append(Log("info", "momentum", fields))
        lr_scale = self.lr_scale * decision.lr_scale * (1.0 if decision.numbers else part)
        found.append(effects.Commit(
            policy.version, tuple(taken), policy.committed_by or (), hyperparameters, lr_scale, decision.reason,
            decision.momentum_among, clip_norm if policy.kind.holds_gradients else 0.0, num_samples,
            policy.num_active if not policy.has_rounds else len(policy.committed_by or ()), iteration,
        ))  # fmt: skip

    def _compare(self, in_mean: list[Pending], groups: Groups, used: float, found: list[Effect]) -> None:
        """Warn once in a run when workers of a round have other hyperparameters or clip to other norms than those that
        are used. Others at the same step of their processes are refused (`difference_of`)."""
        if not self._schedules_differed:
            others = [it.rank for it in in_mean if it.hyperparameters and first_difference(groups, it.hyperparameters)]
            if others:
                self._schedules_differed = True
                meaning = "these ranks are at another place of their schedules, for example after a replacement: the "
                meaning += "round uses the hyperparameters of the process with the most steps"
                found.append(Log("warning", "schedules_differ", {"ranks": others[:_NUM_NAMED], "meaning": meaning}))
        if not self._clip_norms_differed and any(it.contribution.training.clip_norm != used for it in in_mean):
            self._clip_norms_differed = True
            by_rank = sorted((pending.rank, pending.contribution.training.clip_norm) for pending in in_mean)
            norms = ", ".join(f"{norm or 'none'} (rank {rank})" for rank, norm in by_rank[:_NUM_NAMED])
            meaning = "a round is clipped to one norm: give optimizer.clip_grad_norm() the same norm on every worker"
            fields = {"norms": norms, "used": f"{used or 'none'}", "meaning": meaning}
            found.append(Log("warning", "clip_norms_differ", fields))

    def _reply(self, decision: Reply, at: float, found: list[Effect]) -> None:
        rank, outcome = decision.rank, decision.outcome
        worker = self._roster.workers.get(rank)
        if worker is None or worker.is_away:
            return  # it asks again when it is back
        stats, policy, is_start = self._roster.stats[rank], self.policy, outcome is Outcome.START
        reason = _REASONS[outcome]
        if self._empty and rank in self._empty and outcome in COUNTED:
            # A skipped contribution counts, but its worker must take the server's weights.
            outcome, reason = Outcome.REJECTED, self._empty[rank]
        elif outcome is Outcome.REJECTED:
            reason = self._rejected_for.pop(rank, reason)
        elif outcome is Outcome.DROPPED:
            stats.dropped += 1
        gate_wait_s = at - worker.waiting_since if worker.waiting_since is not None else 0.0
        if not is_start:
            stats.wait_s += gate_wait_s
        elif self._started_at is None:
            self._started_at, self._begun_steps = at, policy.min_steps_done
            found.append(Log("info", "training_started", {"workers": len(policy.members), "mode": self._mode}))
        row, (num_workers, index) = policy.progress[rank], self._roster.division(rank)
        is_asked = not index and not self._roster.outsiders
        # Exchanges overlap: metrics requested by one reply may arrive after newer replies.
        if is_asked:
            worker.num_asked = policy.num_in_flight + _ASKED_FOR
        elif worker.num_asked:
            worker.num_asked -= 1
        has_payload = policy.kind.has_payload
        reply = records.Reply(
            records.Result(outcome, policy.rows[rank].seq, policy.version, worker.staleness, gate_wait_s, reason),
            records.NextWork(
                policy.next_local_steps(rank), row.steps, num_workers, index, policy.training_steps, is_asked,
                self.data.twins.pop(rank, None) if self.data.twins else None,
            ),
            group=None if has_payload else self._group(rank, at),
            start=records.StartInfo(row.batches, row.part, self.rates.of_rank.get(rank)) if is_start else None,
        )  # fmt: skip
        is_wanted = is_start or (has_payload and (worker.wants_weights or outcome is not Outcome.APPLIED))
        found.append(effects.SendReply(rank, worker.incarnation, reply, is_wanted, worker.wants_exact))
        worker.waiting_since, worker.staleness, worker.wants_exact = None, 0, False

    def _group(self, rank: int, at: float) -> records.GroupInfo | None:
        """Returns the worker's group. Its lowest rank uploads the weights, and the optimizer's state, for snapshots."""
        group, policy, keeps = self.policy.group_info(rank), self.policy, self._rhythm.keeps_optimizer
        if group is None or not group.members:
            return group
        lowest = group.members[0]
        group = replace(group, rendezvous=self._roster.workers[lowest].rendezvous)
        if rank != lowest:
            return group
        uploads = group.uploads_weights or self._rhythm.is_due(policy.min_steps_done + 1, at)
        # The last snapshot has the optimizer's state too, and any step may be the last.
        uploads |= keeps and policy.training_steps is None
        return replace(group, uploads_weights=uploads, uploads_optimizer=keeps)

    # ---- for the summary, and what survives -------------------------------------------------

    @property
    def step_s(self) -> float:
        """Seconds of one training step of each worker, measured once all have taken their first; 0.0: unknown.

        The time of a single contribution would mislead: a worker dropped from rounds contributes in bursts."""
        steady_s, *_ = self.steady()
        num_steps = self.policy.min_steps_done - self._first[1] if self._first is not None else 0
        return steady_s / num_steps if num_steps > 0 else 0.0

    def uncommitted(self) -> list[Pending]:
        """Returns what counts and is in no version yet."""
        return [*self._in_mean, *self._pending.values()]

    def steady(self) -> tuple[float, int, int]:
        """Returns seconds, samples and training steps of all workers, from the moment when all had taken their first
        step to the newest contribution. Zeros: unknown, or the run is not longer than that."""
        if self._first is None or self._ended_at is None or self._ended_at <= self._first[0]:
            return 0.0, 0, 0
        at, _, samples, steps = self._first
        return self._ended_at - at, self._done[0] - samples, self._done[1] - steps

    def elapsed_s(self, at: float, is_over: bool) -> float:
        """Seconds from the first reply to the newest contribution, or to now while the run goes on."""
        if self._started_at is None:
            return self._elapsed_before_s
        end = self._ended_at if is_over and self._ended_at is not None else at
        return self._elapsed_before_s + end - self._started_at

    def restore(self, training: dict[str, Any]) -> None:
        """Restore the sums of a snapshot; absent and malformed values count from zero."""
        elapsed_s, stats = training.get("elapsed_s"), training.get("stats")
        if isinstance(elapsed_s, int | float):
            self._elapsed_before_s = float(elapsed_s)
        if isinstance(num_samples := training.get("data_samples"), int):
            self.data.num_samples = num_samples
        self.rates.restore(training.get("rates"))
        self.staleness = restored_bins(training.get("staleness"))
        for rank, values in stats.items() if isinstance(stats, dict) else ():
            if rank.isdecimal() and isinstance(values, dict):
                self._roster.stats[int(rank)] = WorkerStats.restored(int(rank), values)
