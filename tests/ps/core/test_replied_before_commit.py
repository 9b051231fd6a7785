"""A mode may reply a contribution before it is committed: what a snapshot then has of it, and a history. What happens
to it otherwise is told in tests/scenarios/run (buffered_*.txt)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paramserver.common.errors import CheckpointError
from paramserver.common.registry import MODES
from paramserver.drills.check import check as check_histories
from paramserver.ps.core import effects
from paramserver.ps.observe.history import line_of
from paramserver.tests.scenarios.telling import Told, make_run


def test_what_no_version_holds_is_done_again_after_a_snapshot_and_counts_once() -> None:
    """The last snapshot is of version 1; contributions 3 of rank 0 and 2 of rank 1 were replied and are not in it."""
    settings = {"mode": "buffered", "num_workers": 2, "buffer": 3, "keeps_snapshots": True, "every_s": 1e6}
    before = Told(make_run(settings))
    for event in ("enter w0", "enter w1", "bring w0", "stored 1 v0"):
        before.tell(event)
    for event in ("contribute w0 s1", "contribute w0 s2", "contribute w1 s1", "contribute w0 s3"):
        before.tell(event)
    assert before.tell("contribute w1 s2") == "keep w1#2; fold w1#2; reply w1 v1"
    assert before.tell("stop").endswith("snapshot 2 of v1")
    assert {rank: seq for rank, (seq, *_) in before.saved["rows"].items()} == {0: 2, 1: 1}
    stats, bins = before.saved["training"]["stats"], before.saved["training"]["staleness"]
    assert sum(bins.values()) == 3
    assert sum(int(behind) * count for behind, count in bins.items()) == sum(
        stats_entry["staleness_sum"] for stats_entry in stats.values()
    )
    assert sum(before.run.contributions.staleness.values()) == 5

    run = make_run(settings)
    run.restore(1, ("model", "sgd"), before.saved)
    assert run.contributions.staleness == {int(behind): count for behind, count in bins.items()}
    after = Told(run)
    assert after.tell("enter w0") == "seat w0.2 at s2"
    assert after.tell("enter w1") == "seat w1.2 at s1; reply w0 START v1; reply w1 START v1"
    # An old process that goes on where it was told begins there too: what it had been replied for is a gap.
    assert after.tell("contribute w1 s3").startswith("discard w1#3; refuse w1.2: SEQ_GAP")
    assert after.tell("leave w1").startswith("fence w1.2")
    assert after.tell("contribute w0 s3") == "keep w0#3; fold w0#3; reply w0 v1"
    assert after.tell("enter w1") == "seat w1.3 at s1; reply w1 START v1"
    assert after.tell("contribute w1 s2") == "keep w1#2; fold w1#2; reply w1 v1"
    committed = "keep w1#3; fold w1#3; commit v2 [w0#3 w1#2 w1#3]; reply w1 v2"
    assert after.tell("contribute w1 s3") == committed
    assert run.policy.committed == run.policy.rows and [run.policy.seq(rank) for rank in (0, 1)] == [3, 3]


def test_a_snapshot_taken_while_the_buffer_is_half_full_has_what_its_version_has() -> None:
    run = Told(make_run({"mode": "buffered", "num_workers": 1, "buffer": 2, "keeps_snapshots": True, "every_s": 5.0}))
    for event in ("enter w0", "bring w0", "stored 1 v0", "contribute w0 s1", "contribute w0 s2", "contribute w0 s3"):
        run.tell(event)
    assert run.tell("after 5 s") == "snapshot 2 of v1"
    assert run.saved["rows"] == {0: [2, 2, 2, 2, 0]}
    assert run.tell("stored 2 v1") == "prune below v1"
    assert run.tell("contribute w0 s4").startswith("keep w0#4; fold w0#4; commit v2 [w0#3 w0#4]")


def test_its_history_is_sound_for_the_checker_that_knows_the_mode() -> None:
    """As the run tells it; also where one of a rank's steps in a version is empty. In another mode it is not sound."""
    run = Told(make_run({"mode": "buffered", "num_workers": 2, "buffer": 3}))
    for event in ("enter w0", "enter w1", "bring w0", "contribute w0 s1 skip", "contribute w0 s2", "contribute w1 s1"):
        run.tell(event)
    for event in ("contribute w0 s3", "contribute w0 s4", "contribute w1 s2", "leave w1"):
        run.tell(event)
    problems = problems_of(run, "buffered")
    assert problems == []
    assert "rank 0 gets its reply for contribution 1, which is not committed" in problems_of(run, "async")[0]


def problems_of(run: Told, mode: str) -> list[str]:
    options = MODES.load(mode).Options(**({"buffer": 3} if mode == "buffered" else {})).model_dump(mode="json")
    start = effects.RunStarted("run", 1, mode, 0, {}, 2, None, None, (), options)
    lines = [line_of(fact) for fact in (start, *run.facts)]
    history = [json.dumps({"op": op, "role": "server", "t": 0.0, **fields}).encode() + b"\n" for op, fields in lines]
    return [problem.message for problem in check_histories({"h": history}).problems]


# ---- what a mode saves ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ({"good": 1, "seen": {1, 2}}, "'seen' of its saved_state is {1, 2}"),
        ({"by_rank": {0: 1}}, "'by_rank' of its saved_state is {0: 1}"),  # would come back as {"0": 1}
        ({"pair": (1, 2)}, "'pair' of its saved_state is (1, 2)"),
        ({"rate": float("nan")}, "'rate' of its saved_state is nan"),
    ],
)
def test_a_saved_state_that_is_not_json_is_refused_when_it_is_made(state: dict[str, Any], shown: str) -> None:
    run = make_run({"mode": "async", "keeps_snapshots": True})
    run.policy.saved_state = lambda: state  # type: ignore[method-assign]
    recorded = Told(run)
    recorded.tell("enter w0")
    end = recorded.tell("bring w0")
    assert end.startswith("begin with the weights of w0; refuse w0.1: ")
    assert f"end with 2: mode async cannot be saved: {shown}, which is not the same after it has been JSON" in end
    assert run.is_closed


def test_a_restore_that_raises_is_a_sentence_with_the_mode_and_the_snapshot() -> None:
    run = make_run({"mode": "async"})

    def restore(*arguments: Any) -> None:
        raise KeyError("scale")

    run.policy.restore = restore  # type: ignore[method-assign]
    saved = {"run": "r", "server_incarnation": 1, "policy": {"x": 1}, "rows": {}, "num_joins": {}, "training": {}}
    with pytest.raises(CheckpointError) as caught:
        run.restore(4, ("model", "sgd"), saved, "/somewhere/v4")
    assert caught.value.exit_code == 14
    assert caught.value.message == (
        "mode async cannot go on from snapshot /somewhere/v4: its restore of {'x': 1} raised KeyError: 'scale'"
    )
    assert "--resume never" in caught.value.fix
