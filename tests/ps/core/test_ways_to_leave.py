"""Workers that leave, come back late or never: the others go on, no counted work is lost, and the run ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paramserver.common.wire.records import Row
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Run
from paramserver.tests.scenarios.telling import make_run

from ...records import contributed


def run_of(mode: str, num_workers: int | None = 2, **settings: Any) -> Run:
    return make_run({"mode": mode, "num_workers": num_workers, **settings})


def resumed(before: Run, mode: str, num_workers: int | None = 2, **settings: Any) -> Run:
    saved = json.loads(json.dumps(before.saved(0.0)))
    for name in ("rows", "num_joins"):
        saved[name] = {int(rank): value for rank, value in saved[name].items()}
    run = run_of(mode, num_workers, **settings)
    run.restore(before.policy.version, ("model", "sgd"), saved, "snapshot")
    return run


def join(run: Run, *ranks: int, at: float = 0.0) -> list[effects.Effect]:
    found = []
    for rank in ranks:
        found += run.apply(events.Joined(rank + 1, rank, process=f"w{rank} at {at}", at=at))
        incarnation = run.roster.workers[rank].incarnation
        found += run.apply(events.Offered(rank, incarnation, "model", "sgd", at=at))
        if run.initializer is not None and not run.has_weights:
            found += run.apply(events.Brought(rank, incarnation, at=at))
    return found


def contribute(run: Run, rank: int, times: int = 1, at: float = 0.0, behind: int = 0) -> list[effects.Effect]:
    found = []
    for _ in range(times):
        incarnation, number = run.roster.workers[rank].incarnation, run.policy.seq(rank) + 1
        found += run.apply(contributed(rank, incarnation, number, run.policy.version - behind, at=at))
    return found


def finish(run: Run, rank: int, at: float = 0.0) -> list[effects.Effect]:
    return run.apply(events.Finished(rank, run.roster.workers[rank].incarnation, at=at))


def lose(run: Run, rank: int, at: float) -> list[effects.Effect]:
    return run.apply(events.Disconnected(rank, run.roster.workers[rank].incarnation, at=at))


def granted(found: list[effects.Effect]) -> dict[int, int]:
    """The training steps that replies grant."""
    replies = [effect for effect in found if isinstance(effect, effects.SendReply)]
    return {reply.rank: reply.reply.next_work.local_steps for reply in replies}


@pytest.mark.parametrize("mode", ["ssp", "dssp", "async"])
def test_ranks_with_other_numbers_but_equal_steps_wait_for_nobody(mode: str) -> None:
    """A backup worker's contributions were dropped, so it has fewer of them, and as many training steps."""
    before = run_of("sync", training_steps=40, backup_workers=1)
    join(before, 0, 1)
    for _ in range(10):
        contribute(before, 0)
        contribute(before, 1, behind=1)
    assert before.policy.rows == {0: Row(10, 10, 10, 10), 1: Row(0, 10, 0, 10)}
    run = resumed(before, mode, training_steps=40)
    may_go = granted(join(run, 0, 1))
    for _ in range(100):
        for rank in (1, 0):
            if may_go.pop(rank, 0):
                may_go |= granted(contribute(run, rank))
    assert [run.policy.steps_done(rank) for rank in (0, 1)] == [40, 40]


def test_a_rank_that_is_through_and_gone_holds_nobody() -> None:
    run = run_of("async", training_steps=3, min_workers=2)
    join(run, 0, 1)
    contribute(run, 0, times=3)
    lose(run, 0, at=2.0)
    assert granted(contribute(run, 1, at=3.0)) == {1: 1}


def test_a_second_process_that_dies_at_once_does_not_end_the_run() -> None:
    run = run_of("async", training_steps=3)
    join(run, 0, 1)
    contribute(run, 1, at=1.0)
    contribute(run, 0, times=3, at=1.0)
    finish(run, 0, at=1.0)
    lose(run, 1, at=2.0)
    run.apply(events.Joined(9, 1, process="new", at=4.0))
    lose(run, 1, at=4.5)
    assert not run.is_done
    run.apply(events.Ticked(at=100.0))
    assert run.is_done


def test_after_a_restart_the_first_worker_back_waits_for_the_others() -> None:
    before = run_of("async", None, training_steps=10)
    join(before, 0, 1)
    contribute(before, 0, times=9)
    contribute(before, 1, times=4)
    run = resumed(before, "async", None, training_steps=10)
    join(run, 0, at=1.0)
    contribute(run, 0, at=1.1)
    finish(run, 0, at=1.2)
    assert not run.is_done
    run.apply(events.Ticked(at=100.0))
    assert run.is_done


@pytest.mark.parametrize("settings", [{"training_steps": 20}, {"training_steps": 3, "min_workers": 2}])
def test_what_the_buffer_holds_is_in_the_last_version(settings: dict[str, int]) -> None:
    run = run_of("buffered", buffer=4, **settings)
    join(run, 0, 1)
    contribute(run, 0, times=3, at=1.0)
    finish(run, 0, at=2.0)
    lose(run, 1, at=3.0)
    run.apply(events.Ticked(at=100.0))
    assert run.is_done and run.policy.committed[0].seq == 3


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_new_rank_begins_where_the_last_one_was(mode: str) -> None:
    run = run_of(mode, None, training_steps=100)
    join(run, 0)
    contribute(run, 0, times=90)
    lose(run, 0, at=1.0)
    join(run, 5, at=2.0)
    assert run.policy.steps_done(5) == 90


def test_snapshots_go_on_when_a_rank_comes_back_far_behind() -> None:
    run = run_of("async", keeps_snapshots=True, every_steps=10, training_steps=1000)
    join(run, 0, 1)
    run.apply(events.Stored(1, 0, at=0.0))
    contribute(run, 1)
    lose(run, 1, at=1.0)
    num = 0
    for step in range(300):
        if step == 200:
            join(run, 1, at=2.0)
            num = 0
        found = contribute(run, 0, at=3.0) + (contribute(run, 1, at=3.0) if step >= 200 else [])
        for effect in found:
            if isinstance(effect, effects.TakeSnapshot):
                num += 1
                run.apply(events.Stored(effect.attempt, effect.version, at=3.0))
    assert num == 10, "one for every ten steps of the slowest"


def test_uploads_that_have_all_the_memory_are_folded_when_a_deadline_goes() -> None:
    run = run_of("sync", 6, training_steps=10, straggler_timeout_s=30.0, max_staged=4)
    join(run, *range(6))
    run.apply(events.Controlled("set", None, "straggler_timeout_s", None))
    folded = [effect for rank in (2, 3, 4, 5) for effect in contribute(run, rank) if isinstance(effect, effects.Fold)]
    assert len(folded) == 4


def test_a_process_without_a_rank_gets_none_that_was_evicted() -> None:
    run = run_of("async", None, training_steps=10)
    join(run, 0, 1)
    run.apply(events.Controlled("evict", 0, "", None))
    (seated,) = run.apply(events.Joined(9, None, process="new"))
    assert isinstance(seated, effects.Seated) and seated.rank == 2
