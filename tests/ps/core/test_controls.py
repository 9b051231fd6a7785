"""What somebody asks of a run that goes on: what follows, what is refused, what a snapshot keeps."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paramserver.common.wire.records import ContributionId
from paramserver.ps.core import controls, effects, events
from paramserver.ps.core.controls import keep_out
from paramserver.ps.core.run import Run
from paramserver.ps.engine.modes import policy_of
from paramserver.tests.scenarios.telling import make_run

from ...records import contributed
from .runs import begin


def run_of(mode: str = "ssp", num_workers: int = 2, has_begun: bool = True, **given: object) -> Run:
    run = make_run({"mode": mode, "num_workers": num_workers, "local_steps": 4, **given})
    return begin(run, num_workers) if has_begun else run


def contribute(run: Run, rank: int) -> list[effects.Effect]:
    number = run.policy.seq(rank) + 1
    return run.apply(contributed(rank, 1, number, run.policy.version))


def ask(run: Run, do: str, rank: int | None = None, name: str = "", value: object = None) -> list[effects.Effect]:
    return run.apply(events.Controlled(do, rank, name, value, number=7))  # type: ignore[arg-type]


def verdict(found: list[effects.Effect]) -> tuple[bool, str]:
    (taken,) = [effect for effect in found if isinstance(effect, effects.ControlTaken)]
    assert taken.event.number == 7
    return taken.is_done, taken.result


def replied(found: list[effects.Effect]) -> list[int]:
    return [effect.rank for effect in found if isinstance(effect, effects.SendReply)]


def commits(found: list[effects.Effect]) -> list[effects.Commit]:
    return [effect for effect in found if isinstance(effect, effects.Commit)]


def test_a_paused_worker_gets_its_reply_when_it_is_resumed() -> None:
    run = run_of("async")
    assert verdict(ask(run, "pause", 1)) == (True, "worker 1 is paused: its next reply waits for a resume")
    assert replied(contribute(run, 0)) == [0]
    assert replied(contribute(run, 1)) == []
    assert run.policy.waiting(0.0) == {1: "a resume: a user paused this worker"}
    assert replied(ask(run, "resume", 1)) == [1]
    assert replied(contribute(run, 1)) == [1]


def test_in_a_round_all_wait_for_a_paused_worker() -> None:
    run = run_of("sync")
    ask(run, "pause", 1)
    contribute(run, 0)
    assert replied(contribute(run, 1)) == [0]
    contribute(run, 0)
    assert run.policy.holders() == (1,)
    assert replied(ask(run, "resume", 1)) == [1]
    assert replied(contribute(run, 1)) == [0, 1]


def test_a_paused_worker_that_leaves_keeps_nobody_waiting() -> None:
    run = run_of("sync")
    ask(run, "pause", 1)
    contribute(run, 0)
    contribute(run, 1)
    contribute(run, 0)
    assert replied(run.apply(events.Left(1, 1))) == [0]
    assert not run.policy.paused


def test_a_larger_lead_lets_those_go_on_who_waited() -> None:
    run = run_of("ssp", staleness=1)
    for _ in range(2):
        found = contribute(run, 0)
    assert replied(found) == []
    found = ask(run, "set", name="staleness", value=3)
    assert verdict(found) == (True, "staleness is 3, was 1")
    assert replied(found) == [0]
    assert run.policy.staleness_bound == 3


@pytest.mark.parametrize("mode", ["async", "sync", "diloco"])
def test_the_rate_of_all_later_commits(mode: str) -> None:
    run = run_of(mode, num_workers=1)
    assert commits(contribute(run, 0))[0].lr_scale == 1.0
    assert verdict(ask(run, "set", name="lr_scale", value=0.25)) == (True, "lr_scale is 0.25, was 1.0")
    assert commits(contribute(run, 0))[0].lr_scale == 0.25


def test_an_evicted_worker_is_missed_by_nobody_and_stays_out() -> None:
    run = run_of("sync")
    contribute(run, 0)
    found = ask(run, "evict", 1)
    assert replied(found) == [0]
    (refused,) = [item for item in found if isinstance(item, effects.Refuse)]
    assert (refused.rank, refused.error.exit_code) == (1, 13)
    (reply,) = run.apply(events.Joined(9, 1, process="another"))
    assert isinstance(reply, effects.NotSeated) and "was evicted" in reply.error.message
    assert replied(contribute(run, 0)) == [0]


def test_a_snapshot_is_taken_with_the_next_commit() -> None:
    run = run_of("async", keeps_snapshots=True)
    attempt = run.rhythm._attempt
    run.apply(events.Stored(attempt, 0))
    assert "snapshot" in controls.offered(run)
    assert verdict(ask(run, "snapshot"))[0]
    assert any(isinstance(item, effects.TakeSnapshot) for item in contribute(run, 0))


def test_drained_everyone_hears_that_there_is_no_next_step() -> None:
    run = run_of("sync")
    ask(run, "pause", 1)
    contribute(run, 0)
    assert verdict(ask(run, "drain"))[0]
    found = contribute(run, 1)
    assert [item.reply.next_work.local_steps for item in found if isinstance(item, effects.SendReply)] in ([0], [0, 0])
    assert run.ended_by == "drained by a user"
    assert verdict(ask(run, "pause", 0)) == (False, "the run is ending")


@pytest.mark.parametrize(
    ("mode", "asked", "why"),
    [
        ("async", ("fly",), "nothing is called 'fly'; there are: drain, pause, resume, evict, set lr_scale"),
        ("ssp", ("pause", 5), "no worker 5 is in the run; there are: 0, 1"),
        ("ssp", ("pause",), "no worker None is in the run; there are: 0, 1"),
        ("ssp", ("resume", 1), "worker 1 is not paused; paused: none"),
        ("ssp", ("snapshot",), "this server keeps no snapshots; start it with --checkpoint-dir DIR"),
        ("ssp", ("set", None, "staleness", -1), "staleness cannot be -1: it should be greater than or equal to 0"),
        ("ssp", ("set", None, "staleness", True), "staleness cannot be True: it is not a switch, got True"),
        ("ssp", ("set", None, "lr_scale", float("nan")), "lr_scale must be a number from 0 to 1,000,000, got nan"),
        ("ssp", ("set", None, "lr_scale", "1"), "lr_scale must be a number from 0 to 1,000,000, got '1'"),
        ("localsgd", ("set", None, "lr_scale", 1),
         "'lr_scale' cannot be changed while localsgd runs; changeable: straggler_timeout_s"),
        ("ssp", ("set", None, "seed", 1),
         "'seed' cannot be changed while ssp runs; changeable: lr_scale, staleness"),
        ("ssp", ("set", None, "mode", "sync"),
         "the mode of a run does not change while workers train; stop it and start the server again with "
         "--resume latest --mode M: it continues from its snapshot"),
    ],
)  # fmt: skip
def test_what_is_not_done_changes_nothing(mode: str, asked: tuple, why: str) -> None:
    run = run_of(mode)
    before = run.digest()
    found = ask(run, *asked)
    assert verdict(found) == (False, why)
    assert len(found) == 1 and run.digest() == before


def test_delayed_update_the_slowest_must_not_wait_for_itself() -> None:
    run = run_of("ssp", staleness=2, delayed_update=True)
    assert verdict(ask(run, "set", name="staleness", value=0)) == (
        False, "with delayed_update staleness must be 1 or more, got 0: all would wait"
    )  # fmt: skip


def restored(run: Run, **settings: object) -> Run:
    again = Run(run.options, policy_of(run.options.mode, {"num_workers": 2, **settings}), "r")
    again.restore(run.policy.version, ("model", "sgd"), json.loads(json.dumps(run.saved(1.0))))
    return again


def test_what_was_set_goes_on_until_the_configuration_says_something_new() -> None:
    """Which is not what was set after it: this goes on too."""
    run = run_of("ssp", staleness=1)
    ask(run, "set", name="staleness", value=5)
    ask(run, "set", name="lr_scale", value=0.5)
    contribute(run, 0)
    again = restored(run, staleness=1)
    assert (again.policy.staleness_bound, again.contributions.lr_scale) == (5, 0.5)
    assert restored(again, staleness=1).policy.staleness_bound == 5
    other = restored(run, staleness=2)
    assert other.policy.staleness_bound == 2
    other.policy.joined(0, 0.0)
    assert verdict(ask(other, "set", name="staleness", value=7))[0]
    assert restored(other, staleness=2).policy.staleness_bound == 7
    assert restored(other, staleness=3).policy.staleness_bound == 3


# ---- any commands in any order ------------------------------------------------------------------------

_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=3),
    st.sampled_from([10**30, 10**400, -(10**4000), 1e308, "sync", "async", "ssp", "dssp", "localsgd", "allreduce"]),
)  # fmt: skip
_NAMES = st.sampled_from(["lr_scale", "mode", "staleness", "staleness_most", "straggler_timeout_s", "seed", ""])
_RANKS = st.one_of(st.none(), st.integers(-1, 3), st.just(10**30))
_COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["pause", "resume", "evict", "snapshot", "drain", "fly"]), _RANKS),
    st.tuples(st.just("set"), st.none(), _NAMES, _VALUES),
    st.tuples(st.just("set"), st.none(), st.just("mode"), st.sampled_from(["async", "ssp", "dssp"])),
    st.tuples(st.just("set"), st.none(), st.just("staleness"), st.integers(0, 5)),
    st.tuples(st.just("set"), st.none(), st.just("straggler_timeout_s"), st.sampled_from([None, 0.5, 5.0])),
)
_EVENTS = st.tuples(st.sampled_from(["step", "join", "leave", "tick"]), st.integers(0, 2))


class Commanded:
    """A run under commands: after each event a snapshot of it is one that the same run goes on from, each contribution
    is in one commit, and who waits for no paused worker waits for one that computes."""

    def __init__(self, mode: str, settings: dict[str, object]) -> None:
        self.settings, self.at, self.busy = settings, 0.0, {0, 1, 2}  # busy: who computes
        self.kept: list[ContributionId] = []
        self.committed: list[ContributionId] = []
        self.run = run_of(mode, num_workers=3, keeps_snapshots=True, **settings)

    def apply(self, event: events.Event) -> None:
        self.at += 0.1
        event.at = self.at
        for effect in self.run.apply(event):
            if isinstance(effect, effects.SendReply):
                self.busy.add(effect.rank)
            elif isinstance(effect, effects.TakeSnapshot):
                self.apply(events.Stored(effect.attempt, effect.version))
            elif isinstance(effect, effects.Commit):
                self.committed += effect.contributions
            elif isinstance(effect, effects.ContributionTaken) and effect.is_kept:
                self.kept.append(effect.contribution.id)
            elif isinstance(effect, effects.End):
                assert effect.error is None, effect.error
        assert len(set(self.committed)) == len(self.committed) and set(self.committed) <= set(self.kept)
        self.survives()

    def check_somebody_computes(self) -> None:
        policy = self.run.policy
        computing = self.busy & set(policy.members)
        if not policy.paused:
            assert computing or not policy.members, f"{policy.waiting(self.at)}, and nobody computes"

    def happens(self, command: str, rank: int) -> None:
        worker = self.run.roster.workers.get(rank)
        if command == "tick":
            self.at += 5 * rank
            self.apply(events.Ticked())
        elif command == "join" and worker is None:
            self.apply(events.Joined(100 + len(self.run.roster.num_joins), rank, process=f"p{self.at}"))
            if (worker := self.run.roster.workers.get(rank)) is not None:
                self.apply(events.Offered(rank, worker.incarnation, "model", "sgd"))
        elif command == "leave" and worker is not None:
            self.busy.discard(rank)
            self.apply(events.Left(rank, worker.incarnation))
        elif command == "step" and rank in self.busy and rank in self.run.policy.members:
            assert worker is not None
            self.busy.discard(rank)
            number = self.run.policy.seq(rank) + 1
            self.apply(contributed(rank, worker.incarnation, number, self.run.policy.version))

    def survives(self) -> None:
        """What a snapshot holds of commands holds in the run that goes on from it."""
        run = self.run
        saved = json.loads(json.dumps(run.saved(self.at), allow_nan=False))
        settings = {"num_workers": 3, "local_steps": 4, **self.settings}
        again = Run(run.options, policy_of(run.options.mode, settings), "r")
        again.restore(run.policy.version, ("model", "sgd"), saved)
        assert (again.mode, again.policy.options) == (run.mode, run.policy.options)
        assert (again.contributions.lr_scale, again.changed) == (run.contributions.lr_scale, run.changed)
        run.digest()


@given(
    st.sampled_from(["sync", "async", "ssp", "dssp", "localsgd", "diloco", "buffered", "async_diloco"]),
    st.sampled_from([{}, {"staleness": 2}, {"delayed_update": True, "staleness": 1}]),
    st.lists(st.one_of(_COMMANDS, _EVENTS), max_size=30),
)
@example("async", {}, [("set", None, "lr_scale", 10**400)])
@example("ssp", {}, [("set", None, "staleness", 10**4000)])
def test_no_sequence_of_commands_ends_the_run_and_all_counts_once(
    mode: str, settings: dict, happened: list[tuple]
) -> None:
    if mode == "sync" and settings.get("delayed_update"):
        settings = {}
    commanded = Commanded(mode, settings)
    for command, *arguments in happened:
        if command in ("step", "join", "leave", "tick"):
            commanded.happens(command, *arguments)
        else:
            commanded.apply(events.Controlled(command, *arguments))
    commanded.check_somebody_computes()


def test_who_was_evicted_stays_out_when_the_run_goes_back() -> None:
    """A shard was lost, and the snapshot is older than the eviction: nobody waits for the rank, or lets it in."""
    before = run_of("sync")
    saved = before.saved(0.0)
    ask(before, "evict", 1)
    run = run_of("sync", has_begun=False)
    run.restore(0, ("", ""), saved)
    keep_out(run, before.roster.evicted)
    (reply,) = run.apply(events.Joined(9, 1, process="another"))
    assert isinstance(reply, effects.NotSeated) and "was evicted" in reply.error.message
    assert run.policy.finished_ranks == {1}
    run.apply(events.Joined(10, 0, process="w0"))
    assert replied(run.apply(events.Offered(0, 2, "", ""))) == [0], "nobody waits for rank 1"
