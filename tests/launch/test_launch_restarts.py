"""Restarts: which failures they mend, the budget, and what holds for any sequence of events."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.launch.plan.hosts import SERVE, SERVER, Child
from paramserver.launch.supervise.restarts import MAX_BACKOFF_S, Failure, Restarts, can_mend
from paramserver.launch.supervise.supervisor import Finish, Kill, Phase, Restart, Start, Supervisor, Terminate

W0, W1 = Child("worker", 0), Child("worker", 1)


def test_what_a_restart_may_mend() -> None:
    """A server listens again, but is not brought back when somebody asked it to end."""
    assert all(can_mend(W0, code, has_listened=True) for code in (1, 15, 130, 143, -9, -11, -6, -15, 3, 255))
    for code in (2, 10, 11, 12, 13, 14, 16, 126):
        assert not can_mend(W0, code, has_listened=True) and not can_mend(SERVER, code, has_listened=False)
    assert can_mend(SERVER, 10, has_listened=True)
    assert not any(can_mend(SERVER, code, has_listened=True) for code in (130, 143, -2, -15))


@settings(deadline=None)
@given(max_restarts=st.integers(0, 5000), backoff_s=st.floats(0, 100))
def test_waits_double_up_to_ten_seconds(max_restarts: int, backoff_s: float) -> None:
    restarts = Restarts(max_restarts, backoff_s)
    waits = []
    while (wait := restarts.next(W0)) is not None:
        waits.append(wait)
    assert len(waits) == restarts.num_restarts[W0] == max_restarts
    assert all(wait == min(MAX_BACKOFF_S, backoff_s * 2.0**index) for index, wait in enumerate(waits[:50]))
    assert waits == sorted(waits)
    assert all(wait <= MAX_BACKOFF_S for wait in waits)
    assert restarts.next(W1) is not None or max_restarts == 0  # each process has a budget of its own


def test_the_first_failure_is_the_oldest_that_was_not_lived_down() -> None:
    restarts = Restarts(3, 0.5)
    for child in (SERVER, W0, W1):
        restarts.started(child, 0.0)
    restarts.failed(Failure(W1, "killed"), 10.0)
    restarts.started(W1, 11.0)
    restarts.failed(Failure(W0, "crashed"), 20.0)
    restarts.started(W0, 21.0)
    restarts.failed(Failure(SERVER, "gone"), 70.9)
    assert restarts.first == Failure(W1, "killed")
    restarts.started(SERVER, 71.0)
    restarts.failed(Failure(SERVER, "gone again"), 71.0)
    assert restarts.first == Failure(W0, "crashed")
    restarts.ended_well(W0)
    assert restarts.first == Failure(SERVER, "gone")


CODES = st.sampled_from([0, 0, 1, 1, 12, 13, 15, 16, 143, -9, -9, -9])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("exit"), st.integers(0, 9), CODES),
        st.tuples(st.just("tick"), st.sampled_from([0.05, 0.3, 1.0, 5.0]), st.just(0)),
        st.tuples(st.just("listening"), st.just(0), st.just(0)),
        st.tuples(st.just("interrupt"), st.integers(0, 40), st.just(0)),  # seldom: only 0 is one
    ),
    max_size=60,
)


class World:
    """Carries decisions out, and notices any that must never be."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.now = 0.0
        self.alive: list[Child] = []
        self.starts: dict[Child, int] = {}
        self.announced: dict[Child, float] = {}  # when a restart is due
        self.is_draining = False
        self.finish: Finish | None = None
        self.carry_out(supervisor.begin(0.0))

    def carry_out(self, decisions: list) -> None:
        for decision in decisions:
            assert self.finish is None, "a decision after the end"
            match decision:
                case Start(child):
                    assert child not in self.alive, "started while it runs"
                    assert not self.is_draining, "started while the job ends"
                    if self.starts.get(child):
                        assert self.announced.pop(child) <= self.now, "started again too early"
                    self.alive.append(child)
                    self.starts[child] = self.starts.get(child, 0) + 1
                case Restart(child, _, in_s):
                    assert child not in self.alive
                    self.announced[child] = self.now + in_s
                case Terminate(child) | Kill(child):
                    assert child in self.alive, "ended what is not there"
                case Finish():
                    assert not self.alive, "finished before the last process"
                    self.finish = decision
        self.is_draining = self.supervisor.phase in (Phase.ENDING, Phase.DRAINING, Phase.OVER)
        if self.finish is None and not self.alive:
            assert self.supervisor.deadline is not None, "nothing runs, nothing ever will, and it is not over"

    def play(self, kind: str, number: float, code: int) -> None:
        if kind == "exit" and self.alive:
            child = self.alive.pop(int(number) % len(self.alive))
            self.carry_out(self.supervisor.exited(child, code, self.now))
        elif kind == "tick":
            self.now += number
            self.carry_out(self.supervisor.tick(self.now))
        elif kind == "listening" and SERVER in self.alive:
            self.carry_out(self.supervisor.listening(SERVER, self.now) + self.supervisor.may_train(self.now))
        elif kind == "interrupt" and number == 0:
            self.carry_out(self.supervisor.interrupt(15, self.now))


@settings(max_examples=400, deadline=None)
@given(
    events=EVENTS, num_workers=st.integers(1, 3), with_server=st.booleans(), keeps_snapshots=st.booleans(),
    max_restarts=st.integers(0, 3), backoff_s=st.sampled_from([0.0, 0.5]), asks_again=st.booleans(),
    has_serve=st.booleans(),
)  # fmt: skip
def test_whatever_happens_the_job_ends_once_and_whole(
    events: list, num_workers: int, with_server: bool, keeps_snapshots: bool, max_restarts: int, backoff_s: float,
    asks_again: bool, has_serve: bool,
) -> None:  # fmt: skip
    world = World(
        Supervisor(
            num_workers=num_workers, num_shards=int(with_server), keeps_snapshots=keeps_snapshots,
            max_restarts=max_restarts, backoff_s=backoff_s, has_serve=has_serve and with_server,
        )
    )  # fmt: skip
    for event in events:
        if world.finish is None:
            world.play(*event)
    for _ in range(1 + asks_again):
        if world.finish is None:
            world.play("interrupt", 0, 0)
    while world.finish is None:  # every process that is asked to end does so
        world.play("exit", 0, -9)
    assert world.supervisor.deadline is None
    assert world.alive == []
    if world.now < 60:  # nobody has lived anything down
        assert all(starts <= 1 + max_restarts for starts in world.starts.values())
    if not with_server or not keeps_snapshots:
        assert world.starts.get(SERVER, 1) == 1
    if world.finish.exit_code == 17:
        assert world.finish.culprit not in (None, SERVE)
        assert world.starts[world.finish.culprit] > max_restarts > 0


@settings(max_examples=100, deadline=None)
@given(codes=st.lists(st.sampled_from([1, 15, -9, -11]), min_size=1, max_size=8), max_restarts=st.integers(1, 4))
def test_a_worker_that_always_fails_ends_the_job_after_its_budget(codes: list[int], max_restarts: int) -> None:
    world = World(Supervisor(num_workers=2, max_restarts=max_restarts, backoff_s=0.01))
    world.play("listening", 0, 0)
    for turn in count():
        assert turn <= max_restarts
        world.alive.remove(W1)
        world.carry_out(world.supervisor.exited(W1, codes[turn % len(codes)], world.now))
        if world.is_draining:
            break
        world.play("tick", 1.0, 0)
    while world.finish is None:
        world.play("exit", 0, 143)
    assert (world.finish.exit_code, world.finish.culprit, world.starts[W1]) == (17, W1, max_restarts + 1)
