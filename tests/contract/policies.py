"""What a policy may never do: a small model store carries out its decisions and knows; the tests of this folder that
are about policies play in this world. The modes come from the registry: a new one is tested by existing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from paramserver.common.registry import MODES
from paramserver.common.wire.records import Contribution
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Commit, Common, Discard, Fold, Outcome, Policy, Refuse, Reply
from paramserver.ps.policies.shared.decisions import Wait

from ..records import contribution_of, generation_of

ALL_MODES = MODES.names()
MAX_RANK = 5


def make_policy(mode: str, **options: Any) -> Policy:
    return policy_of(mode, options)


# ---- the model ----------------------------------------------------------------------------------


@dataclass
class Worker:
    """What a worker knows. `unanswered` is the contribution (or None for a join) it waits for."""

    rank: int
    seq: int
    num_granted: int = 1  # training steps of its next contribution
    base_version: int = 0  # of its next contribution
    held_version: int = 0  # of the weights in its model; delayed_update, that contribution is computed already
    is_fresh: bool = True  # nothing contributed since it joined
    state: str = "waiting"  # waiting, computing, finished
    unanswered: Contribution | None = None
    is_repeat: bool = False
    is_away: bool = False  # its connection is lost, and its reply with it
    counts_for_nothing: bool = False  # the unanswered contribution was dropped or rejected: it may be sent again
    generation: int = 0  # that it was told last
    was_admitted_before_return: bool = False  # since its last reply somebody slower came back


@dataclass
class ModelStore:
    """Carries out decisions and refuses impossible ones. A contribution is (rank, seq)."""

    policy: Policy
    common: Common
    live: dict[int, Worker] = field(default_factory=dict)
    staged: dict[int, tuple[int, int]] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)  # announced with the contribution
    undecided: set[int] = field(default_factory=set)  # ranks: whether what they have staged counts is not said yet
    in_mean: list[tuple[int, int]] = field(default_factory=list)
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    folded: Counter[tuple[int, int]] = field(default_factory=Counter)
    committed: set[tuple[int, int]] = field(default_factory=set)
    version: int = 0
    has_started: bool = False
    steps: dict[int, int] = field(default_factory=dict)  # that count, by rank, live or not
    of_round: dict[int, int] = field(default_factory=dict)  # in a round that is open

    # ---- what the hold and the lead mean, computed without the policy ----

    @property
    def is_held(self) -> bool:
        num_workers = self.common.num_workers
        if not self.has_started and num_workers is not None and len(self.live) < num_workers:
            return True
        return len(self.live) < self.common.min_workers

    def lead(self, rank: int) -> int:
        return self.steps[rank] - min(self.steps[other] for other in self.live)

    def count(self, rank: int, num_steps: int) -> None:
        """In rounds a contribution counts with its round."""
        if self.policy.has_rounds:
            self.of_round[rank] = num_steps
        else:
            self.steps[rank] += num_steps

    def close_round(self) -> None:
        """Ranks that are not in the round go on where it has led."""
        for rank, num_steps in self.of_round.items():
            self.steps[rank] += num_steps
        newest = max(self.steps[rank] for rank in self.of_round)
        for rank in self.steps.keys() - self.of_round.keys():
            self.steps[rank] = max(self.steps[rank], newest)
        self.of_round.clear()

    # ---- carrying out ----

    def carry_out(self, decisions: list[Any], event_rank: int | None) -> None:
        discarded = False
        replied: set[int] = set()
        accepted_now: set[int] = set()
        for decision in decisions:
            match decision:
                case Fold(rank, weight):
                    assert rank in self.staged, f"fold of rank {rank}, which has nothing staged"
                    if rank in self.undecided:
                        self.undecided.remove(rank)
                        self.accepted[self.staged[rank]] += 1
                        self.live[rank].seq += 1
                        self.count(rank, self.live[rank].num_granted)
                        self.live[rank].counts_for_nothing = False
                        accepted_now.add(rank)
                    assert not (discarded and rank == event_rank), "fold after discard"
                    contribution = self.staged.pop(rank)
                    assert self.accepted[contribution] == 1, f"{contribution} folded without being accepted"
                    assert self.folded[contribution] == 0, f"{contribution} folded twice"
                    assert weight == self.weights[contribution] or self.policy.may_scale
                    self.folded[contribution] += 1
                    self.in_mean.append(contribution)
                case Discard(rank) if rank in self.undecided:
                    self.forget(rank)
                case Wait(rank):
                    assert rank == event_rank and rank in self.staged
                    self.undecided.add(rank)
                case Discard(rank):
                    assert rank == event_rank, "only the contribution of the event may be discarded"
                    assert rank in self.staged, f"discard of rank {rank}, which has nothing staged"
                    contribution = self.staged.pop(rank)
                    discarded = True
                case Commit(ranks, reason, lr_scale):
                    assert reason, "a commit without a reason"
                    assert lr_scale > 0 and (lr_scale == 1 or self.policy.may_scale)
                    assert lr_scale == 1 or self.policy.kind.may_lose, "a mean of weights has no rate"
                    assert self.in_mean, "commit of nothing"
                    folded = sorted(rank for rank, _ in self.in_mean)
                    assert sorted(ranks) == folded, "commit names other ranks than were folded"
                    assert accepted_now in (set(), set(ranks)), "a part of those that waited"
                    self.committed.update(self.in_mean)
                    self.in_mean = []
                    self.version += 1
                    if self.policy.has_rounds:
                        self.close_round()
                case Reply(rank, outcome):
                    assert rank in self.live, f"reply to rank {rank}, which is not live"
                    assert rank not in replied, f"rank {rank} replied twice in one event"
                    replied.add(rank)
                    self._reply(self.live[rank], outcome)
                case Refuse(rank, kind, reason):
                    assert rank == event_rank
                    assert reason
                    assert kind in ("NOT_JOINED", "SEQ_GAP")
                    assert discarded, "a refused contribution stays staged"
                case _:
                    raise AssertionError(f"unknown decision {decision!r}")

    def forget(self, rank: int) -> None:
        """What it has staged counts for nothing."""
        if rank in self.undecided:
            self.undecided.remove(rank)
            del self.staged[rank]

    def _reply(self, worker: Worker, outcome: Outcome) -> None:
        assert worker.state == "waiting", f"reply to rank {worker.rank}, which is {worker.state}"
        assert not worker.is_away, f"reply to rank {worker.rank}, whom it does not reach"
        assert not self.is_held, f"rank {worker.rank} goes on while training holds ({outcome.name})"
        key = (worker.rank, worker.unanswered.id.seq) if worker.unanswered else None
        if outcome is Outcome.START:
            assert worker.unanswered is None
        elif outcome is Outcome.APPLIED:
            assert key in self.committed or self._may_be_replied(key), f"{key} replied before it was committed"
        elif outcome is Outcome.REPEATED:
            assert worker.is_repeat
            # Where the original is still in an open round, so must be the reply to its repeat.
            assert key not in self.staged.values()
            assert key not in self.in_mean or self._may_be_replied(key)
        elif outcome in (Outcome.DROPPED, Outcome.REJECTED):
            assert worker.counts_for_nothing
            assert self.accepted[key] == 0
            assert key not in self.staged.values()
        else:
            raise AssertionError(f"unknown outcome {outcome}")
        bound = lead_bound(self.policy)
        if bound is not None:
            # DelayedUpdate, it hands over the step that it computed meanwhile, and starts the one after.
            ahead = self.lead(worker.rank) + self.common.delayed_update
            assert ahead <= bound, f"rank {worker.rank} starts a step {ahead} ahead"
        worker.num_granted = self.policy.next_local_steps(worker.rank)
        worker.state = "finished" if worker.num_granted == 0 else "computing"
        is_computed = self.common.delayed_update and not self.policy.kind.worker_steps and outcome != Outcome.START
        worker.base_version = worker.held_version if is_computed else self.version
        worker.held_version = self.version
        worker.unanswered, worker.is_repeat, worker.was_admitted_before_return = None, False, False
        worker.counts_for_nothing, worker.generation = False, generation_of(self.policy, worker.rank)
        assert self.policy.seq(worker.rank) == worker.seq

    def _may_be_replied(self, key: tuple[int, int] | None) -> bool:
        """It is folded, and no version holds it yet."""
        return self.policy.replies_before_commit and key in self.in_mean


class World:
    """Policy and model store side by side; every event is recorded for the replay."""

    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        self.mode = mode
        self.settings = settings
        self.policy = policy_of(mode, settings)
        self.common = self.policy.common
        self.store = ModelStore(self.policy, self.common)
        self.now = 100.0
        self.says_generations = True  # False: workers report of the newest
        self.events: list[tuple[Callable[..., list[Any]], tuple[Any, ...]]] = []
        self.decided: list[list[Any]] = []
        self.last_seqs: dict[int, int] = {}
        self.is_sound = True  # False from the first broken promise on

    def event(
        self, name: str, *arguments: Any, rank: int | None = None, held_back: tuple[int, int] | None = None
    ) -> list[Any]:
        """`held_back`: staged by the same rank, which the event's own payload stands in front of."""
        self.is_sound = False
        decisions = getattr(self.policy, name)(*arguments, self.now)
        self.events.append((name, (*arguments, self.now)))
        self.decided.append(decisions)
        if not self.store.is_held:
            self.store.has_started = True
        self.store.carry_out(decisions, rank)
        if held_back is not None and rank is not None:
            self.store.staged[rank] = held_back
        self.check()
        return decisions

    # ---- events ----

    def join(self, rank: int) -> None:
        # A rank new to a running job starts where the slowest live one is, or the run was. One that returns goes on.
        steps = self.store.steps
        slowest = min((steps[other] for other in self.store.live), default=max(steps.values(), default=0))
        seq = self.last_seqs.setdefault(rank, 0)
        if steps.setdefault(rank, slowest) < slowest:
            for worker in self.store.live.values():
                worker.was_admitted_before_return = True
        self.store.live[rank] = Worker(rank, seq)
        self.event("joined", rank)

    def leave(self, rank: int) -> None:
        worker = self.store.live.pop(rank, None)
        self.store.forget(rank)
        decisions = self.event("left", rank)
        assert worker is not None or decisions == []

    def contribute(
        self, rank: int, num_samples: int = 1, base_version: int | None = None, is_broken: bool = False
    ) -> None:
        worker = self.store.live[rank]
        base = worker.base_version if base_version is None else base_version
        contribution = contribution_of(
            worker.seq + 1, base, num_samples, max(1, worker.num_granted),
            generation=worker.generation * self.says_generations, failed=is_broken,
        )  # fmt: skip
        key = (rank, contribution.id.seq)
        assert rank not in self.store.staged, "a worker that computes has nothing staged"
        self.store.staged[rank] = key
        self.store.weights[key] = float(num_samples) if self.common.weighting == "samples" else 1.0
        worker.state, worker.unanswered, worker.is_away = "waiting", contribution, False
        before, self.is_sound = self.policy.seq(rank), False
        staleness = self.policy.staleness(rank, contribution)
        assert staleness >= 0
        # Weights contain the average they were last built on, but delayed_update they were computed before it came.
        if self.policy.kind.worker_steps and base == self.policy.version:
            assert staleness == (1 if self.common.delayed_update and not worker.is_fresh else 0)
        worker.is_fresh = False
        # Whether it is accepted shows in the policy's own table; the model notes it before it sees folds.
        decisions = getattr(self.policy, "contributed")(rank, contribution, self.now)  # noqa: B009
        self.events.append(("contributed", (rank, contribution, self.now)))
        self.decided.append(decisions)
        grown = self.policy.seq(rank) - before
        if Wait(rank) in decisions:
            worker.counts_for_nothing, grown = True, 0
        assert grown in (0, 1)
        if grown:
            self.store.accepted[key] += 1
            assert self.store.accepted[key] == 1, f"{key} accepted twice"
            worker.seq += 1
            self.last_seqs[rank] = worker.seq
            self.store.count(rank, contribution.counts.num_steps)
            bound = lead_bound(self.policy)
            if bound is not None and not worker.was_admitted_before_return:
                assert self.store.lead(rank) <= bound + 1 - self.common.delayed_update
        else:
            assert Discard(rank) in decisions or Wait(rank) in decisions, "neither accepted nor discarded"
        worker.counts_for_nothing = not grown
        self.store.carry_out(decisions, rank)
        self.last_seqs.update({item.rank: item.seq for item in self.store.live.values()})
        self.check()

    def repeat(self, rank: int) -> None:
        worker = self.store.live[rank]
        self.store.forget(rank)
        held_back = self.store.staged.pop(rank, None)  # the original, where it waits to be folded
        self.store.staged[rank] = (rank, worker.seq)
        worker.unanswered = contribution_of(worker.seq, worker.base_version, num_samples=99)
        worker.state, worker.is_repeat, worker.is_away, worker.counts_for_nothing = "waiting", True, False, False
        accepted = self.store.accepted.copy()
        if held_back is None:
            decisions = self.event("contributed", rank, worker.unanswered, rank=rank)
        else:  # the repeat's own payload is discarded, the original stays where it is
            self.is_sound = False
            decisions = self.policy.contributed(rank, worker.unanswered, self.now)
            self.events.append(("contributed", (rank, worker.unanswered, self.now)))
            self.decided.append(decisions)
            assert decisions[0] == Discard(rank)
            self.store.staged[rank] = held_back
            self.store.carry_out(decisions[1:], rank)
            self.check()
        assert Discard(rank) in decisions
        assert not any(isinstance(decision, Fold) and decision.rank == rank for decision in decisions)
        assert self.store.accepted == accepted

    def refuse(self, rank: int, seq: int, kind: str) -> None:
        """A contribution that must be refused, whole and without effect on anyone."""
        held_back = self.store.staged.pop(rank, None)
        self.store.staged[rank] = (rank, seq)
        version, last = self.policy.version, dict(self.policy.rows)
        decisions = self.event("contributed", rank, contribution_of(seq, version), rank=rank, held_back=held_back)
        assert [type(decision) for decision in decisions] == [Discard, Refuse]
        assert decisions[1].kind == kind
        assert (self.policy.version, self.policy.rows) == (version, last)

    def reject(self, rank: int) -> None:
        """Its next contribution has come, and cannot be used."""
        worker = self.store.live[rank]
        worker.unanswered = contribution_of(worker.seq + 1, worker.base_version)
        worker.state, worker.is_away, worker.counts_for_nothing = "waiting", False, True
        counted = {other: self.policy.seq(other) for other in self.policy.rows}
        self.event("rejected", rank, rank=rank)
        assert {other: self.policy.seq(other) for other in self.policy.rows} == counted

    def disconnect(self, rank: int) -> None:
        """Its connection is lost; it is a member still."""
        self.store.live[rank].is_away = True
        self.store.forget(rank)
        self.policy.disconnected(rank)
        self.events.append(("disconnected", (rank,)))
        self.decided.append(None)
        self.check()

    def ask_again(self, rank: int) -> None:
        """A worker that is back asks for what it was not told."""
        if self.store.live[rank].counts_for_nothing:
            self.contribute(rank)
        else:
            self.repeat(rank)

    # ---- what holds after every event ----

    def check(self) -> None:
        self.is_sound = False
        before = repr(vars(self.policy))
        self._check()
        assert repr(vars(self.policy)) == before, "a question changed the policy"
        self.is_sound = True

    def _check(self) -> None:
        store, policy = self.store, self.policy
        assert policy.version == store.version, "version is not the number of commits"
        assert set(policy.members) == set(store.live)
        assert {rank: row.seq for rank, row in policy.rows.items()} == self.last_seqs
        assert {rank: policy.steps_done(rank) for rank in policy.rows} == store.steps
        for rank, worker in store.live.items():
            assert policy.lead(rank) == store.lead(rank)
            assert policy.seq(rank) == worker.seq
            assert 0 <= policy.next_local_steps(rank) <= policy.local_steps
            assert 0 <= policy.steps_done(rank) <= self.common.training_steps
            assert policy.upload_position(rank) >= 0
        live = policy.members or policy.rows
        assert policy.min_steps_done == min(map(policy.steps_done, live), default=0)
        staged = [tensor for rank, tensor in store.staged.items() if rank not in store.undecided]
        uncommitted = Counter(rank for rank, _ in [*staged, *store.in_mean])
        assert {rank: row.seq + uncommitted[rank] for rank, row in policy.committed.items()} == self.last_seqs
        for state in (policy.saved_state(), policy.full_state()):
            assert json.loads(json.dumps(state)) == state
        waiting = {rank for rank, worker in store.live.items() if worker.state == "waiting" and not worker.is_away}
        reasons = policy.waiting(0.0)
        assert set(reasons) == waiting, "waiting() names others than those that wait"
        assert all(reasons.values())
        assert (policy.waiting_reason(0.0) != "") >= (bool(store.live) and waiting == set(store.live))
        # Whatever was accepted lies in memory, in the mean, or in a version; nowhere twice.
        places = Counter([*staged, *store.in_mean, *store.committed])
        assert places == Counter(store.accepted)
        self.check_nobody_is_stuck(waiting)

    def check_nobody_is_stuck(self, waiting: set[int]) -> None:
        """Who waits, waits for somebody who is live and computing: a departed worker blocks nobody."""
        if self.store.is_held or not waiting:
            return
        busy = set(self.store.live) - waiting
        assert busy, f"all of {sorted(waiting)} wait: {self.policy.waiting(0.0)}"
        computing = {rank for rank in busy if self.store.live[rank].state != "finished"}  # or away, and asks again
        assert computing, f"{sorted(waiting)} wait, and nobody else will ever contribute"
        if lead_bound(self.policy) is not None:
            slowest = min(self.store.steps[rank] for rank in self.store.live)
            assert any(self.store.steps[rank] == slowest for rank in computing)

    def replay(self) -> None:
        """The same events on a fresh policy give the same decisions."""
        fresh = policy_of(self.mode, self.settings)
        for (name, arguments), decided in zip(self.events, self.decided, strict=True):
            assert getattr(fresh, name)(*arguments) == decided
        assert fresh.full_state() == self.policy.full_state()

    def settle_everything(self) -> None:
        """When everybody missing joins and everybody contributes, all that was accepted is committed."""
        wanted = max(self.common.min_workers, self.common.num_workers or 0)
        for rank in range(wanted):
            if rank not in self.store.live:
                self.join(rank)
        for rank, worker in list(self.store.live.items()):
            if worker.is_away and worker.state == "waiting":
                self.ask_again(rank)
        for _ in range(2 * (MAX_RANK + 2) * (1 + max(self.last_seqs.values(), default=0))):
            if not self.store.staged and not self.store.in_mean:
                break
            computing = [worker for worker in self.store.live.values() if worker.state == "computing"]
            assert computing, "something accepted is not committed, and nobody computes"
            self.contribute(min(computing, key=lambda worker: (worker.seq, worker.rank)).rank)
        assert self.store.committed == set(self.store.accepted)


def lead_bound(policy: Policy) -> int | None:
    """In rounds the bound is of versions, and a rank's number of contributions has none."""
    return None if policy.has_rounds else policy.staleness_bound


@st.composite
def mode_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Of `Common` and of all modes; one of your own is tested with its defaults."""
    num_workers = draw(st.none() | st.integers(1, 4))
    return {
        "training_steps": draw(st.sampled_from([1, 5, 1000])),
        "num_workers": num_workers,
        "min_workers": draw(st.integers(1, min(3, num_workers or 3))),
        "staleness": draw(st.integers(0, 3)),
        "local_steps": draw(st.integers(1, 4)),
        "straggler_timeout_s": draw(st.none() | st.just(2.0)),
        "straggler_mad": draw(st.none() | st.just(3.0)),
        "backup_workers": draw(st.integers(0, min(2, (num_workers or 3) - 1))),
        "weighting": draw(st.sampled_from(["samples", "equal"])),
    }
