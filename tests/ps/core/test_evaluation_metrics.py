"""What workers say of the run's length and of its weights while it goes on."""

from __future__ import annotations

import pytest

from paramserver.common.wire.records import FirstInfo
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Run
from paramserver.tests.scenarios.telling import make_run

from ...records import contributed
from .runs import begin


def run_of(mode: str = "sync", steps: int | None = None, **options: object) -> Run:
    return make_run({"mode": mode, "training_steps": steps, "num_workers": 2, "local_steps": 4, **options})


def contribute(run: Run, number: int, *steps: int) -> list[effects.Effect]:
    """One of each rank; `steps`: what they say of the length, in their order."""
    version = run.policy.version
    found = []
    for rank in range(2):
        step = steps[rank] if steps else 0
        num_steps = run.policy.next_local_steps(rank)
        event = contributed(rank, 1, number, version, num_steps=num_steps, first=FirstInfo(40, rank + 1, step))
        found += run.apply(event)
    return found


def logged(found: list[effects.Effect], name: str) -> list[dict]:
    return [effect.fields for effect in found if isinstance(effect, effects.Log) and effect.event == name]


def replies(found: list[effects.Effect]) -> list[int]:
    return [effect.reply.next_work.local_steps for effect in found if isinstance(effect, effects.SendReply)]


def test_without_a_length_a_run_goes_on_until_all_have_finished() -> None:
    run = begin(run_of())
    for number in range(1, 20):
        assert replies(contribute(run, number)) == [1, 1]
    for rank in range(2):
        found = run.apply(events.Finished(rank, 1, stays=True))
    assert any(isinstance(effect, effects.TellDone) for effect in found)
    assert run.policy.min_steps_done == 19


@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_the_first_word_on_the_length_counts_and_another_is_said(mode: str) -> None:
    run = begin(run_of(mode))
    found = contribute(run, 1, 6, 7)
    assert logged(found, "length") == [{"rank": 0, "steps": 6}]
    assert "has 6 training steps (rank 0), rank 1 would take 7" in logged(found, "lengths_differ")[0]["meaning"]
    found = contribute(run, 2, 6, 7)
    assert replies(found) == ([1, 1] if mode == "sync" else [0, 0])
    for number in range(3, 7 if mode == "sync" else 3):
        found = contribute(run, number)
    assert replies(found) == [0, 0] and run.policy.min_steps_done == 6


def test_the_length_survives_and_other_epochs_are_asked_for_again() -> None:
    run = begin(run_of(epochs=3))
    contribute(run, 1, 6, 6)
    saved = run.saved(1.0)
    for epochs, steps, length in ((3, None, 6), (5, None, None), (None, 9, 9)):
        again = run_of(steps=steps, epochs=epochs)
        again.restore(1, ("model", "sgd"), saved)
        assert again.policy.training_steps == length


@pytest.mark.parametrize(
    ("steps", "epochs", "is_over"), [(None, None, True), (9, None, False), (None, 5, False), (3, None, True)]
)
def test_who_has_left_of_its_own_accord_is_asked_again_by_another_length(
    steps: int | None, epochs: int | None, is_over: bool
) -> None:
    run = begin(run_of())
    for number in range(1, 4):
        contribute(run, number)
    for rank in range(2):
        run.apply(events.Finished(rank, 1, stays=True))
    again = run_of(steps=steps, epochs=epochs)
    again.restore(3, ("model", "sgd"), run.saved(1.0))
    assert again.was_over_before == is_over


def metrics(run: Run, version: int, loss: float, rank: int | None = 0, **more: object) -> list[effects.Effect]:
    return run.apply(events.MetricsReceived(rank, version, version, {"loss": loss}, **more))  # type: ignore[arg-type]


def test_metrics_of_a_version_count_once_and_the_best_is_said() -> None:
    run = begin(run_of())
    for number in range(1, 4):
        contribute(run, number)
    facts = [
        fact
        for version, loss in ((1, 2.0), (1, 1.0), (2, 3.0), (3, 1.5), (4, 0.0))
        for fact in metrics(run, version, loss)
    ]
    found = [(fact.point.version, fact.is_best) for fact in facts if isinstance(fact, effects.MetricsTaken)]
    assert found == [(1, True), (2, False), (3, True)], "version 4 there is not"
    again = run_of()
    again.restore(3, ("model", "sgd"), run.saved(1.0))
    assert again.curve.points == run.curve.points and again.curve.best == run.curve.best


def test_enough_stops_all_at_one_border() -> None:
    run = begin(run_of(stop_when="loss < 1"))
    contribute(run, 1)
    metrics(run, 1, 0.5)
    assert replies(contribute(run, 2)) == [0, 0]
    assert run.ended_by == "stopped: loss < 1 (run.stop_when): 0.5 at step 1" and run.failure is None


@pytest.mark.parametrize(("rank", "who"), [(0, "rank 0"), (None, "the evaluator")])
def test_a_failure_is_the_run_s_and_nobody_evaluates_the_final_weights(rank: int | None, who: str) -> None:
    run = begin(run_of())
    contribute(run, 1)
    found = metrics(run, 1, 0.5, rank, failure="ValueError: no", exit_code=3)
    assert logged(found, "run_failed")[0]["exit_code"] == 3
    assert replies(contribute(run, 2)) == [0, 0]
    for item in range(2):
        found = run.apply(events.Finished(item, 1, stays=True))
    assert [effect.asked for effect in found if isinstance(effect, effects.TellDone)] == [None]
    assert (run.failure.message, run.failure.exit_code) == (
        f"{who} failed in the evaluation at step 1: ValueError: no",
        3,
    )


def test_while_a_evaluator_is_there_workers_are_told() -> None:
    run = begin(run_of())

    def asked(number: int) -> list[int]:
        found = [effect for effect in contribute(run, number) if isinstance(effect, effects.SendReply)]
        return [effect.rank for effect in found if effect.reply.next_work.is_asked]

    run.apply(events.HeartbeatBegan("evaluator", is_outside=True))
    assert asked(1) == []
    run.apply(events.HeartbeatStopped("evaluator"))
    assert asked(2) == [0]


def test_all_shards_keep_the_version_that_is_newest_when_a_evaluator_asks_for_it() -> None:
    run = run_of("async", keeps_best=True)
    assert run.apply(events.CopyAsked()) == [], "there are no weights yet"
    begin(run)
    contribute(run, 1)
    assert run.apply(events.CopyAsked()) == [effects.KeepWeights(2)]


def test_metrics_of_a_worker_that_was_not_asked_change_nothing() -> None:
    """Neither the curve, nor the end of the run, nor its final metrics; the warning names who sent them."""
    run = begin(run_of(stop_when="loss < 1", best="loss"))
    contribute(run, 1)
    for more in ({}, {"failure": "ValueError: no", "exit_code": 3}):
        found = metrics(run, 1, 0.5, 1, **more)
        assert [fields["rank"] for fields in logged(found, "metrics_ignored")] == [1]
    assert run.curve.points == [] and run.failure is None
    assert replies(contribute(run, 2)) == [1, 1]
    run.apply(events.HeartbeatBegan("evaluator", is_outside=True))
    for number in range(3, 6):
        contribute(run, number)
    assert logged(metrics(run, 5, 0.5, 0), "metrics_ignored"), "the evaluator is asked, and no worker"
    metrics(run, 5, 2.0, None)
    assert [point.metrics for point in run.curve.points] == [{"loss": 2.0}]


@pytest.mark.parametrize("is_done", [True, False])
def test_final_metrics_are_those_of_one_worker(is_done: bool) -> None:
    run = begin(run_of())
    contribute(run, 1)
    for rank in range(2 if is_done else 0):
        run.apply(events.Finished(rank, 1, stays=True))
    found = run.apply(events.Left(1, 1, "goodbye", metrics={"accuracy": 1.0}))
    assert [fields["rank"] for fields in logged(found, "metrics_ignored")] == [1]
    run.apply(events.Left(0, 1, "goodbye", metrics={"accuracy": 0.5}))
    assert run.final == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("options", "ends"), [({"keeps_best": True}, False), ({"best": "torque"}, True), ({"patience": 2}, True)]
)
def test_a_metric_without_a_direction_ends_only_a_run_that_asked_for_the_best(options: dict, ends: bool) -> None:
    """--save names a file for the best weights by itself: nobody asked for a best evaluation."""
    run = begin(run_of(**options))
    contribute(run, 1)
    found = run.apply(events.MetricsReceived(0, 1, 1, {"torque": 2.0}))
    assert bool(logged(found, "run_failed")) is ends
    assert (run.failure is not None) is ends
