"""Every mode keeps the promises of ps/policies/base.py, whatever happens in whatever order.

The modes come from the registry: a new one is tested by existing. A small model store carries out
the decisions and knows what must never happen; hypothesis looks for an order of events that makes
it happen anyway.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from paramserver.common.registry import MODES
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Answer, Commit, Common, Contribution, Discard, Fold, Outcome, Policy, Refuse
from paramserver.ps.tensors.staging import StagingPool
from paramserver.worker.session import Progress

ALL_MODES = MODES.names()
_MAX_RANK = 5
# Without the phase that explains a failure: it traces every line.
SETTINGS = settings(
    max_examples=200, stateful_step_count=40, deadline=None, phases=(Phase.reuse, Phase.generate, Phase.shrink)
)


def make_policy(mode: str, **options: Any) -> Policy:
    return policy_of(mode, options)


ROUND_MODES = [mode for mode in ALL_MODES if getattr(make_policy(mode), "has_fixed_set", False)]


# ---- the model ----------------------------------------------------------------------------------


@dataclass
class Worker:
    """What a worker knows. `unanswered` is the contribution (or None for a join) it waits for."""

    rank: int
    step: int
    base_version: int = 0  # of its next contribution
    held_version: int = 0  # of the weights in its model; pipelined, that contribution is computed already
    is_fresh: bool = True  # nothing contributed since it joined
    state: str = "waiting"  # waiting, computing, finished
    unanswered: Contribution | None = None
    is_repeat: bool = False
    is_away: bool = False  # its connection is lost, and its answer with it
    counts_for_nothing: bool = False  # the unanswered contribution was dropped or rejected: it may be sent again
    was_admitted_before_return: bool = False  # since its last answer somebody slower came back


@dataclass
class ModelStore:
    """Carries out decisions and refuses impossible ones. A contribution is (rank, step)."""

    policy: Policy
    common: Common
    live: dict[int, Worker] = field(default_factory=dict)
    staged: dict[int, tuple[int, int]] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)  # announced with the contribution
    in_mean: list[tuple[int, int]] = field(default_factory=list)
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    folded: Counter[tuple[int, int]] = field(default_factory=Counter)
    committed: set[tuple[int, int]] = field(default_factory=set)
    version: int = 0
    has_started: bool = False
    max_lead_answered: int = 0

    # ---- what the hold and the lead mean, computed without the policy ----

    @property
    def is_held(self) -> bool:
        num_workers = self.common.num_workers
        if not self.has_started and num_workers is not None and len(self.live) < num_workers:
            return True
        return len(self.live) < self.common.min_workers

    def lead(self, rank: int) -> int:
        return self.live[rank].step - min(worker.step for worker in self.live.values())

    # ---- carrying out ----

    def carry_out(self, decisions: list[Any], event_rank: int | None) -> None:
        discarded = False
        answered: set[int] = set()
        for decision in decisions:
            match decision:
                case Fold(rank, weight):
                    assert rank in self.staged, f"fold of rank {rank}, which has nothing staged"
                    assert not (discarded and rank == event_rank), "fold after discard"
                    contribution = self.staged.pop(rank)
                    assert self.accepted[contribution] == 1, f"{contribution} folded without being accepted"
                    assert self.folded[contribution] == 0, f"{contribution} folded twice"
                    assert weight == self.weights[contribution]
                    self.folded[contribution] += 1
                    self.in_mean.append(contribution)
                case Discard(rank):
                    assert rank == event_rank, "only the contribution of the event may be discarded"
                    assert rank in self.staged, f"discard of rank {rank}, which has nothing staged"
                    contribution = self.staged.pop(rank)
                    discarded = True
                case Commit(ranks, reason, scales):
                    assert reason, "a commit without a reason"
                    assert len(scales) in (0, len(ranks)), "one scale for each contribution, or none"
                    assert all(scale > 0 for scale in scales)
                    assert not scales or self.policy.may_scale
                    assert not scales or self.policy.contribution == "gradient", "a mean of weights has no rate"
                    assert self.in_mean, "commit of nothing"
                    folded = sorted(rank for rank, _ in self.in_mean)
                    assert sorted(ranks) == folded, "commit names other ranks than were folded"
                    self.committed.update(self.in_mean)
                    self.in_mean = []
                    self.version += 1
                case Answer(rank, outcome, reason):
                    assert reason, "an answer without a reason"
                    assert rank in self.live, f"answer to rank {rank}, which is not live"
                    assert rank not in answered, f"rank {rank} answered twice in one event"
                    answered.add(rank)
                    self._answer(self.live[rank], outcome)
                case Refuse(rank, kind, reason):
                    assert rank == event_rank
                    assert reason
                    assert kind in ("NOT_JOINED", "STEP_GAP")
                    assert discarded, "a refused contribution stays staged"
                case _:
                    raise AssertionError(f"unknown decision {decision!r}")

    def _answer(self, worker: Worker, outcome: Outcome) -> None:
        assert worker.state == "waiting", f"answer to rank {worker.rank}, which is {worker.state}"
        assert not worker.is_away, f"answer to rank {worker.rank}, whom it does not reach"
        assert not self.is_held, f"rank {worker.rank} goes on while training holds ({outcome.name})"
        key = (worker.rank, worker.unanswered.number) if worker.unanswered else None
        if outcome is Outcome.START:
            assert worker.unanswered is None
        elif outcome is Outcome.APPLIED:
            assert key in self.committed, f"{key} answered as applied before it was committed"
        elif outcome is Outcome.REPEATED:
            assert worker.is_repeat
            # Where the original is still in an open round, so must be the answer to its repeat.
            assert key not in self.staged.values()
            assert key not in self.in_mean
        elif outcome in (Outcome.DROPPED, Outcome.REJECTED):
            assert worker.counts_for_nothing
            assert self.accepted[key] == 0
            assert key not in self.staged.values()
        else:
            raise AssertionError(f"unknown outcome {outcome}")
        bound = self.policy.staleness_bound
        if bound is not None:
            # Pipelined, it hands over the step that it computed meanwhile, and starts the one after.
            ahead = self.lead(worker.rank) + self.common.pipelined
            assert ahead <= bound, f"rank {worker.rank} starts a step {ahead} ahead"
        worker.state = "finished" if self.policy.next_local_steps(worker.rank) == 0 else "computing"
        is_computed = self.common.pipelined and self.policy.contribution == "gradient" and outcome != Outcome.START
        worker.base_version = worker.held_version if is_computed else self.version
        worker.held_version = self.version
        worker.unanswered, worker.is_repeat, worker.was_admitted_before_return = None, False, False
        worker.counts_for_nothing = False
        assert self.policy.num_counted[worker.rank] == worker.step


class World:
    """Policy and model store side by side; every event is recorded for the replay."""

    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        self.mode = mode
        self.settings = settings
        self.policy = policy_of(mode, settings)
        self.common = self.policy.common
        self.store = ModelStore(self.policy, self.common)
        self.now = 100.0
        self.events: list[tuple[Callable[..., list[Any]], tuple[Any, ...]]] = []
        self.decided: list[list[Any]] = []
        self.last_steps: dict[int, int] = {}
        self.is_sound = True  # False from the first broken promise on

    def event(
        self, name: str, *arguments: Any, rank: int | None = None, held_back: tuple[int, int] | None = None
    ) -> list[Any]:
        """`held_back`: staged by the same rank, which the event's own body stands in front of."""
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
        # A rank new to a running job starts where the slowest live one is, one that returns where it was.
        slowest = min((worker.step for worker in self.store.live.values()), default=0)
        step = self.last_steps.setdefault(rank, slowest)
        if step < slowest:
            for worker in self.store.live.values():
                worker.was_admitted_before_return = True
        self.store.live[rank] = Worker(rank, step)
        self.event("joined", rank)

    def leave(self, rank: int) -> None:
        worker = self.store.live.pop(rank, None)
        decisions = self.event("left", rank)
        assert worker is not None or decisions == []

    def contribute(self, rank: int, num_samples: int = 1, base_version: int | None = None) -> None:
        worker = self.store.live[rank]
        base = worker.base_version if base_version is None else base_version
        contribution = Contribution(worker.step + 1, base, num_samples)
        key = (rank, contribution.number)
        assert rank not in self.store.staged, "a worker that computes has nothing staged"
        self.store.staged[rank] = key
        self.store.weights[key] = float(num_samples) if self.common.weighting == "samples" else 1.0
        worker.state, worker.unanswered, worker.is_away = "waiting", contribution, False
        before, self.is_sound = self.policy.num_counted[rank], False
        staleness = self.policy.staleness(rank, contribution)
        assert staleness >= 0
        # Weights contain the average they were last built on, but pipelined they were computed before it came.
        if self.policy.contribution == "weights" and base == self.policy.version:
            assert staleness == (1 if self.common.pipelined and not worker.is_fresh else 0)
        worker.is_fresh = False
        # Whether it is accepted shows in the policy's own table; the model notes it before it sees folds.
        decisions = getattr(self.policy, "contributed")(rank, contribution, self.now)  # noqa: B009
        self.events.append(("contributed", (rank, contribution, self.now)))
        self.decided.append(decisions)
        grown = self.policy.num_counted[rank] - before
        assert grown in (0, 1)
        if grown:
            self.store.accepted[key] += 1
            assert self.store.accepted[key] == 1, f"{key} accepted twice"
            worker.step += 1
            self.last_steps[rank] = worker.step
            bound = self.policy.staleness_bound
            if bound is not None and not worker.was_admitted_before_return:
                assert self.store.lead(rank) <= bound + 1 - self.common.pipelined
        else:
            assert Discard(rank) in decisions, "neither accepted nor discarded"
        worker.counts_for_nothing = not grown
        self.store.carry_out(decisions, rank)
        self.check()

    def repeat(self, rank: int) -> None:
        worker = self.store.live[rank]
        held_back = self.store.staged.pop(rank, None)  # the original, where it waits to be folded
        self.store.staged[rank] = (rank, worker.step)
        worker.unanswered = replace(Contribution(worker.step, worker.base_version), num_samples=99)
        worker.state, worker.is_repeat, worker.is_away, worker.counts_for_nothing = "waiting", True, False, False
        accepted = self.store.accepted.copy()
        if held_back is None:
            decisions = self.event("contributed", rank, worker.unanswered, rank=rank)
        else:  # the repeat's own body is discarded, the original stays where it is
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

    def refuse(self, rank: int, step: int, kind: str) -> None:
        """A contribution that must be refused, whole and without effect on anyone."""
        held_back = self.store.staged.pop(rank, None)
        self.store.staged[rank] = (rank, step)
        version, last = self.policy.version, dict(self.policy.num_counted)
        decisions = self.event("contributed", rank, Contribution(step, version), rank=rank, held_back=held_back)
        assert [type(decision) for decision in decisions] == [Discard, Refuse]
        assert decisions[1].kind == kind
        assert (self.policy.version, self.policy.num_counted) == (version, last)

    def reject(self, rank: int) -> None:
        """Its next contribution has come, and cannot be used."""
        worker = self.store.live[rank]
        worker.unanswered = Contribution(worker.step + 1, worker.base_version)
        worker.state, worker.is_away, worker.counts_for_nothing = "waiting", False, True
        counted = dict(self.policy.num_counted)
        self.event("rejected", rank, rank=rank)
        assert self.policy.num_counted == counted

    def disconnect(self, rank: int) -> None:
        """Its connection is lost; it is a member still."""
        self.store.live[rank].is_away = True
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
        assert policy.num_counted == {rank: self.last_steps[rank] for rank in policy.num_counted}
        for rank, worker in store.live.items():
            assert policy.lead(rank) == store.lead(rank)
            assert policy.num_counted[rank] == worker.step
            assert 0 <= policy.next_local_steps(rank) <= policy.local_steps
            assert 0 <= policy.steps_done(rank) <= self.common.training_steps
            assert policy.upload_position(rank) >= 0
        live = policy.members or policy.num_counted
        assert policy.min_steps_done == min(map(policy.steps_done, live), default=0)
        uncommitted = Counter(rank for rank, _ in [*store.staged.values(), *store.in_mean])
        assert policy.num_committed() == {rank: n - uncommitted[rank] for rank, n in policy.num_counted.items()}
        for state in (policy.saved_state(), policy.full_state()):
            assert json.loads(json.dumps(state)) == state
        waiting = {rank for rank, worker in store.live.items() if worker.state == "waiting" and not worker.is_away}
        reasons = policy.waiting(0.0)
        assert set(reasons) == waiting, "waiting() names others than those that wait"
        assert all(reasons.values())
        assert (policy.waiting_reason(0.0) != "") >= (bool(store.live) and waiting == set(store.live))
        # Whatever was accepted lies in memory, in the mean, or in a version; nowhere twice.
        places = Counter([*store.staged.values(), *store.in_mean, *store.committed])
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
        if self.policy.staleness_bound is not None:
            slowest = min(worker.step for worker in self.store.live.values())
            assert any(self.store.live[rank].step == slowest for rank in computing)

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
        for _ in range(2 * (_MAX_RANK + 2) * (1 + max(self.last_steps.values(), default=0))):
            if not self.store.staged and not self.store.in_mean:
                break
            computing = [worker for worker in self.store.live.values() if worker.state == "computing"]
            assert computing, "something accepted is not committed, and nobody computes"
            self.contribute(min(computing, key=lambda worker: (worker.step, worker.rank)).rank)
        assert self.store.committed == set(self.store.accepted)


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
        "backup_workers": draw(st.integers(0, min(2, (num_workers or 3) - 1))),
        "weighting": draw(st.sampled_from(["samples", "equal"])),
    }


class PolicyMachine(RuleBasedStateMachine):
    """Events in any order; the choice of a rank is a number, taken modulo those that apply."""

    mode: str

    @initialize(settings=mode_settings(), pipelined=st.booleans())
    def start(self, settings: dict[str, Any], pipelined: bool) -> None:
        kind = MODES.load(self.mode)
        may = kind.may_pipeline and settings["staleness"] >= kind.least_pipelined_staleness
        self.world = World(self.mode, {**settings, "pipelined": pipelined and may})
        self.last_rank = (settings["num_workers"] or _MAX_RANK) - 1

    def ranks(self, *states: str) -> list[int]:
        return [rank for rank, worker in self.world.store.live.items() if worker.state in states]

    def absent(self) -> list[int]:
        return [rank for rank in range(self.last_rank + 1) if rank not in self.world.store.live]

    @precondition(lambda self: self.absent())
    @rule(pick=st.integers(0, 20))
    def joins(self, pick: int) -> None:
        absent = self.absent()
        self.world.join(absent[pick % len(absent)])

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20), num_samples=st.integers(1, 9))
    def contributes(self, pick: int, num_samples: int) -> None:
        computing = self.ranks("computing")
        self.world.contribute(computing[pick % len(computing)], num_samples)

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20), ahead=st.integers(1, 3))
    def contributes_on_a_version_that_never_was(self, pick: int, ahead: int) -> None:
        computing = self.ranks("computing")
        version = self.world.policy.version + ahead
        self.world.contribute(computing[pick % len(computing)], base_version=version)

    @precondition(lambda self: self.world.store.live)
    @rule(pick=st.integers(0, 20))
    def leaves(self, pick: int) -> None:
        live = list(self.world.store.live)
        self.world.leave(live[pick % len(live)])

    @rule(rank=st.integers(0, 9))
    def leaves_again(self, rank: int) -> None:
        if rank not in self.world.store.live:
            self.world.leave(rank)

    @precondition(lambda self: self.ranks("computing", "waiting"))
    @rule(pick=st.integers(0, 20))
    def repeats(self, pick: int) -> None:
        ranks = [r for r in self.ranks("computing", "waiting") if self.world.policy.num_counted[r] > 0]
        if ranks:
            self.world.repeat(ranks[pick % len(ranks)])

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20), gap=st.sampled_from([-3, -1, 2, 1000]))
    def skips_a_step(self, pick: int, gap: int) -> None:
        computing = self.ranks("computing")
        rank = computing[pick % len(computing)]
        step = self.world.policy.num_counted[rank] + gap
        if step >= 1:
            self.world.refuse(rank, step, "STEP_GAP")
            self.world.leave(rank)  # a refused call ends

    @precondition(lambda self: self.ranks("computing"))
    @rule(pick=st.integers(0, 20))
    def contributes_what_cannot_be_used(self, pick: int) -> None:
        computing = self.ranks("computing")
        self.world.reject(computing[pick % len(computing)])

    @precondition(lambda self: self.world.store.live)
    @rule(pick=st.integers(0, 20))
    def loses_its_connection(self, pick: int) -> None:
        live = list(self.world.store.live)
        self.world.disconnect(live[pick % len(live)])

    def owed(self) -> list[int]:
        """Ranks that lost their connection before they were answered."""
        return [rank for rank in self.ranks("waiting") if self.world.store.live[rank].is_away]

    @precondition(lambda self: self.owed())
    @rule(pick=st.integers(0, 20))
    def asks_again(self, pick: int) -> None:
        self.world.ask_again(self.owed()[pick % len(self.owed())])

    @precondition(lambda self: self.owed())
    @rule(pick=st.integers(0, 20))
    def goes_on_without_asking(self, pick: int) -> None:
        rank = self.owed()[pick % len(self.owed())]
        if not self.world.store.live[rank].counts_for_nothing:
            self.world.refuse(rank, self.world.policy.num_counted[rank] + 1, "STEP_GAP")

    @rule(rank=st.integers(0, 9))
    def speaks_without_having_joined(self, rank: int) -> None:
        if rank not in self.world.store.live and rank not in self.world.store.staged:
            self.world.refuse(rank, self.world.policy.num_counted.get(rank, 0) + 1, "NOT_JOINED")

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.9, 2.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.event("tick")

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.is_sound:
            self.world.settle_everything()
            self.world.replay()


@pytest.mark.parametrize("mode", ALL_MODES)
def test_any_order_of_events(mode: str) -> None:
    machine = type(f"{mode}Machine", (PolicyMachine,), {"mode": mode})
    run_state_machine_as_test(machine, settings=SETTINGS)


# ---- scales ------------------------------------------------------------------------------------


def test_the_rate_of_a_commit_is_scaled_by_the_weighted_mean_of_its_scales() -> None:
    assert Commit((3, 1), "", (0.5, 0.25)).lr_scale([(1, 3.0), (3, 1.0)]) == pytest.approx((0.5 + 3 * 0.25) / 4)
    assert Commit((3,), "", (0.2,)).lr_scale([(3, 64.0)]) == pytest.approx(0.2)
    assert Commit((3, 1), "", (0.5, 0.25)).lr_scale([(3, 0.0), (1, 3.0)]) == 0.25, "of rank 3 nothing was folded"
    assert Commit((3, 1), "").lr_scale([(1, 3.0), (3, 1.0)]) == 1.0
    assert Commit((3,), "", (0.2,)).lr_scale([(3, 0.0)]) == 1.0


# ---- going on from a snapshot --------------------------------------------------------------------


class Twins:
    """Two policies that are given the same events and must decide the same."""

    def __init__(self, first: Policy, second: Policy) -> None:
        self._first, self._second = first, second

    def __getattr__(self, name: str) -> Any:
        of_first = getattr(self._first, name)
        if name not in ("joined", "left", "contributed", "rejected", "tick"):
            return of_first

        def both(*arguments: Any) -> Any:
            decided = of_first(*arguments)
            assert getattr(self._second, name)(*arguments) == decided
            return decided

        return both


def play_on(world: World, data: st.DataObject, ranks: Sequence[int] = range(3)) -> None:
    """Workers of these ranks contribute, go and come back, in any order."""
    for _ in range(data.draw(st.integers(0, 25))):
        live = sorted(world.store.live)
        actions = [("contribute", rank) for rank in live if world.store.live[rank].state == "computing"]
        actions += [("reject", rank) for _, rank in actions] + [("leave", rank) for rank in live]
        actions += [("join", rank) for rank in ranks if rank not in live]
        if not actions:
            return
        action, rank = data.draw(st.sampled_from(actions))
        world.now += data.draw(st.sampled_from([0.0, 1.0, 3.0]))
        getattr(world, action)(rank)


@pytest.mark.parametrize("mode", ALL_MODES)
@given(told=mode_settings(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_restored_policy_decides_as_the_saved_one_would(mode: str, told: dict[str, Any], data: Any) -> None:
    world = World(mode, {**told, "training_steps": 1000, "num_workers": None})
    play_on(world, data)
    world.settle_everything()  # what is in no version is not saved
    saved = world.policy
    state = json.loads(json.dumps(saved.saved_state()))
    restored = policy_of(mode, world.settings)
    restored.restore(saved.version, saved.num_committed(), state)
    assert restored.saved_state() == saved.saved_state()
    for rank in sorted(world.store.live):
        world.leave(rank)
    for rank in sorted(world.last_steps):
        world.join(rank)
        restored.joined(rank, world.now)
    world.policy = Twins(saved, restored)  # type: ignore[assignment]
    # A rank that is new while nobody is live begins at 0 in a run, and at the others' in one that goes on.
    play_on(world, data, sorted(world.last_steps))


# ---- holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALL_MODES)
def test_training_starts_when_all_workers_have_joined(mode: str) -> None:
    policy = make_policy(mode, num_workers=3)
    assert policy.joined(2, 0.0) == []
    assert policy.joined(0, 0.0) == []
    assert policy.waiting_reason(0.0) == "2 of 3 workers have joined; missing rank 1"
    answers = policy.joined(1, 0.0)
    assert [(answer.rank, answer.outcome) for answer in answers] == [(rank, Outcome.START) for rank in range(3)]
    assert policy.waiting(0.0) == {}
    # Once started, fewer than num_workers go on.
    assert all(not isinstance(d, Answer) for d in policy.left(2, 0.0))
    assert policy.waiting(0.0) == {}
    assert [a.outcome for a in policy.joined(2, 0.0)] == [Outcome.START]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_training_holds_below_min_workers(mode: str) -> None:
    policy = make_policy(mode, min_workers=2)
    assert policy.joined(0, 0.0) == []
    assert len(policy.joined(1, 0.0)) == 2
    policy.left(1, 0.0)
    decisions = policy.contributed(0, Contribution(1, 0), 0.0)
    assert not any(isinstance(decision, Answer) for decision in decisions)
    assert policy.waiting(0.0) == {0: "1 of at least 2 workers (policy.min_workers) are live"}
    assert policy.tick(1e9) == [], "no time-out lifts a hold"
    back = policy.joined(1, 0.0)
    assert 1 in {decision.rank for decision in back if isinstance(decision, Answer)}


# ---- steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("steps", "local_steps"), [(1, 1), (1, 4), (7, 3), (8, 4), (10, 1)])
def test_a_worker_takes_exactly_its_steps(mode: str, steps: int, local_steps: int) -> None:
    """The steps between answers add up to `steps`, also where a contribution covers several that do not divide it."""
    policy = make_policy(mode, training_steps=steps, local_steps=local_steps, num_workers=2)
    for rank in (0, 1):
        policy.joined(rank, 0.0)
    taken = 0
    step = 0
    while (num := policy.next_local_steps(0)) > 0:
        assert policy.next_local_steps(1) == num
        assert num <= policy.local_steps
        assert policy.steps_done(0) == taken
        taken += num
        step += 1
        for rank in (0, 1):
            policy.contributed(rank, Contribution(step, policy.version), 0.0)
        assert step <= steps
    assert taken == steps
    assert policy.steps_done(0) == policy.steps_done(1) == steps
    assert policy.waiting(0.0) == {}


@pytest.mark.parametrize("mode", ALL_MODES)
def test_finished_workers_hold_nobody_back(mode: str) -> None:
    """The one that is slow, or comes late, still takes all its steps while the others have ended."""
    policy = make_policy(mode, training_steps=4, num_workers=2, staleness=10)
    for rank in (0, 1):
        policy.joined(rank, 0.0)
    for step in range(1, 5):
        policy.contributed(0, Contribution(step, policy.version), 0.0)
        if policy.waiting(0.0):
            policy.contributed(1, Contribution(step, policy.version), 0.0)
    for step in range(policy.num_counted[1] + 1, 5):
        policy.contributed(1, Contribution(step, policy.version), 0.0)
        assert policy.waiting(0.0) == {}
    assert policy.next_local_steps(0) == policy.next_local_steps(1) == 0


@pytest.mark.parametrize("mode", [mode for mode in ALL_MODES if MODES.load(mode).may_pipeline])
@pytest.mark.parametrize(("steps", "local_steps"), [(1, 1), (7, 3), (8, 4), (10, 1)])
def test_pipelined_workers_guess_their_steps_right(mode: str, steps: int, local_steps: int) -> None:
    """Before its answer has come a worker knows how many local steps follow, and which contribution is the last."""
    policy = make_policy(
        mode, training_steps=steps, local_steps=local_steps, num_workers=1, staleness=3, pipelined=True
    )
    policy.joined(0, 0.0)
    progress = Progress()
    progress.answered(0, 0, policy.next_local_steps(0), True)
    is_last = False
    while not is_last:
        is_last = progress.assume_counted(steps)
        policy.contributed(0, Contribution(progress.num_counted, policy.version), 0.0)
        assert progress.local_steps == progress.num_counteds_left == policy.next_local_steps(0)
        assert progress.training_steps == policy.steps_done(0)
        assert is_last == (policy.next_local_steps(0) == 0)
    assert progress.num_counted == policy.num_counted[0]


# ---- the order of folding -----------------------------------------------------------------------


@dataclass
class Round:
    """What one round of a mode with a fixed set of workers decides."""

    folds: list[Fold] = field(default_factory=list)
    commits: list[tuple[int, ...]] = field(default_factory=list)


def play_rounds(mode: str, arrivals: list[list[int]], num_samples: dict[int, int], order: list[int]) -> list[Round]:
    policy = make_policy(mode, num_workers=len(order))
    for rank in order:
        policy.joined(rank, 0.0)
    rounds = []
    for step, arrival in enumerate(arrivals, 1):
        decided = Round()
        for rank in arrival:
            for decision in policy.contributed(rank, Contribution(step, policy.version, num_samples[rank]), 0.0):
                if isinstance(decision, Fold):
                    decided.folds.append(decision)
                elif isinstance(decision, Commit):
                    decided.commits.append(decision.ranks)
        rounds.append(decided)
    return rounds


@pytest.mark.parametrize("mode", ROUND_MODES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_fold_order_does_not_depend_on_arrival(mode: str, data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, 7))
    ranks = list(range(num_workers))
    num_samples = {rank: data.draw(st.integers(1, 50)) for rank in ranks}
    arrivals = [data.draw(st.permutations(ranks)) for _ in range(3)]
    rounds = play_rounds(mode, arrivals, num_samples, data.draw(st.permutations(ranks)))
    expected = [Fold(rank, float(num_samples[rank])) for rank in ranks]
    assert [decided.folds for decided in rounds] == [expected] * 3
    assert [decided.commits for decided in rounds] == [[tuple(ranks)]] * 3


@pytest.mark.parametrize("mode", ROUND_MODES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_fold_order_survives_departures(mode: str, data: st.DataObject) -> None:
    """Who leaves before contributing changes who is folded, not the order of the others."""
    num_workers = data.draw(st.integers(2, 7))
    ranks = list(range(num_workers))
    gone = set(data.draw(st.lists(st.sampled_from(ranks), max_size=num_workers - 1, unique=True)))
    policy = make_policy(mode, num_workers=num_workers)
    for rank in ranks:
        policy.joined(rank, 0.0)
    folded = []
    for rank in data.draw(st.permutations(ranks)):
        decisions = policy.left(rank, 0.0) if rank in gone else policy.contributed(rank, Contribution(1, 0), 0.0)
        folded += [decision.rank for decision in decisions if isinstance(decision, Fold)]
    assert folded == [rank for rank in ranks if rank not in gone]
    assert policy.version == 1


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_what_waited_behind_a_departed_worker_is_folded_at_once(mode: str) -> None:
    """Its memory is needed by others; the round itself stays open for rank 3."""
    policy = make_policy(mode, num_workers=4)
    for rank in range(4):
        policy.joined(rank, 0.0)
    for rank in (1, 2):
        assert policy.contributed(rank, Contribution(1, 0), 0.0) == []
    assert policy.left(0, 0.0) == [Fold(1, 1.0), Fold(2, 1.0)]


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("options", [{"straggler_timeout_s": 1.0}, {"backup_workers": 1}])
def test_without_a_fixed_set_nobody_waits_for_a_stragglers_upload(mode: str, options: dict[str, Any]) -> None:
    policy = make_policy(mode, num_workers=3, **options)
    for rank in range(3):
        policy.joined(rank, 0.0)
    for rank in (2, 1):
        assert policy.upload_position(rank) == 0
        assert Fold(rank, 1.0) in policy.contributed(rank, Contribution(1, 0), 0.0)


# ---- uploads ----------------------------------------------------------------------------------


async def let_coroutines_run() -> None:
    """One turn for coroutines whose future was resolved, one for what they in turn resolve."""
    for _ in range(2):
        await asyncio.sleep(0)


class Uploads:
    """Workers that upload into a real StagingPool in the order a real policy gives."""

    def __init__(self, mode: str, limit: int, num_workers: int, options: dict[str, Any]) -> None:
        self.policy = make_policy(mode, num_workers=num_workers, **options)
        self.pool = StagingPool(limit, 8)
        self.steps: dict[int, int] = {}
        self.wants: dict[int, asyncio.Task[Any]] = {}  # ask for memory
        self.bodies: dict[int, Any] = {}  # upload
        self.staged: dict[int, Any] = {}  # accepted, not folded
        self.mean: Any = None
        self.computing: set[int] = set()
        self.all_bodies: set[int] = set()

    def join(self, rank: int) -> None:
        self.perform(self.policy.joined(rank, 0.0))

    def ask(self, rank: int) -> None:
        self.computing.remove(rank)
        self.wants[rank] = asyncio.ensure_future(self.pool.borrow(lambda: self.policy.upload_position(rank)))

    def collect(self) -> None:
        for rank, task in list(self.wants.items()):
            if task.done():
                del self.wants[rank]
                self.bodies[rank] = task.result()
                self.all_bodies.add(id(task.result()))
        assert len({id(body) for body in [*self.bodies.values(), *self.staged.values()]}) == self.pool.num_lent
        assert self.pool.num_lent <= self.pool.limit

    def complete(self, rank: int) -> None:
        self.staged[rank] = self.bodies.pop(rank)
        contribution = Contribution(self.policy.num_counted[rank] + 1, self.policy.version)
        self.perform(self.policy.contributed(rank, contribution, 0.0))

    async def leave(self, rank: int) -> None:
        if rank in self.wants:
            task = self.wants.pop(rank)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif rank in self.bodies:
            self.pool.give_back(self.bodies.pop(rank))
        self.computing.discard(rank)
        self.perform(self.policy.left(rank, 0.0))

    def perform(self, decisions: list[Any]) -> None:
        for decision in decisions:
            match decision:
                case Fold(rank):
                    body = self.staged.pop(rank)
                    if self.mean is None:
                        self.mean = body
                        self.pool.donate(body)
                    else:
                        self.pool.give_back(body)
                case Commit():
                    self.pool.reclaim([self.mean])
                    self.mean = None
                case Answer(rank):
                    self.computing.add(rank)
                case Discard(rank):
                    self.pool.give_back(self.staged.pop(rank))
        self.pool.look_again()


@pytest.mark.parametrize("mode", ALL_MODES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_uploads_never_wait_for_each_other_for_ever(mode: str, data: st.DataObject) -> None:
    """With any number of bodies and any order of arrival, somebody who asked for memory has it."""

    async def play() -> None:
        num_workers = data.draw(st.integers(1, 8))
        options = data.draw(st.sampled_from([{}, {"staleness": 2}, {"backup_workers": 1}]))
        options = options if num_workers > options.get("backup_workers", 0) else {}
        uploads = Uploads(mode, data.draw(st.integers(1, 4)), num_workers, options)
        for rank in range(num_workers):
            uploads.join(rank)
        next_rank = num_workers
        for _ in range(data.draw(st.integers(5, 60))):
            actions: list[tuple[str, int]] = [("ask", rank) for rank in sorted(uploads.computing)]
            actions += [("complete", rank) for rank in sorted(uploads.bodies)]
            if next_rank < num_workers + 2:
                actions.append(("join", next_rank))
            if len(uploads.policy.members) > 1:
                actions += [("leave", rank) for rank in sorted(uploads.policy.members)]
            action, rank = data.draw(st.sampled_from(actions))
            if action == "join":
                uploads.join(rank)
                next_rank += 1
            elif action == "leave":
                await uploads.leave(rank)
            else:
                getattr(uploads, action)(rank)
            await let_coroutines_run()
            uploads.collect()
            if uploads.wants and not uploads.computing:
                assert uploads.bodies, f"ranks {sorted(uploads.wants)} wait for memory that nobody gives back"
        # At most what may be lent, the mean, and one more while the mean is exchanged.
        assert len(uploads.all_bodies) <= uploads.pool.limit + 2

    asyncio.run(play())
