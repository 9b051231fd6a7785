"""A race: who is best and when a target is reached, from made-up curves; what is refused; and a short one, as root."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramserver.benchmarks.measures.race import RaceOptions, Record, _turns, best_rate, reached, summed_up
from paramserver.benchmarks.rig.race_run import Run
from paramserver.benchmarks.rig.racer import NUM_SAMPLES
from paramserver.common.errors import UsageError
from paramserver.tests.benchmarks.test_bench import check_numbers
from paramserver.tests.hosts import why_not

CURVE = [(1.0, 10.0, 4.0), (2.0, 30.0, 3.0), (3.0, 50.0, 3.5), (4.0, 70.0, 2.0)]


def run(lr: float, loss: float) -> Run:
    return Run(lr, 40, [(5.0, 1.0, 4.0), (10.0, 2.0, loss)])


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (3.0, (2.0, 30.0)),
        (3.25, (1.75, 25.0)),  # the first time, though the curve rises again
        (2.5, (3 + 1 / 1.5, 50 + 20 / 1.5)),
        (math.log(256), (0.0, 0.0)),
        (1.9, None),
    ],
)
def test_a_target_is_reached_between_two_samples_or_never(target: float, found: tuple[float, float] | None) -> None:
    assert reached(CURVE, target) == (found and pytest.approx(found))


def test_a_side_stands_with_its_best_rate_of_those_that_every_seed_survived() -> None:
    runs = [
        run(0.1, 2.0),
        run(0.1, 3.0),
        run(0.2, 2.2),
        run(0.2, 2.4),
        run(0.4, 1.0),
        run(0.8, 0.5),
        run(0.8, math.nan),
    ]
    assert {found.lr for found in best_rate(runs, seeds=2)} == {0.2}
    assert best_rate(runs[-2:], seeds=2) == []


def test_sides_are_ordered_by_loss_and_the_target_is_plain_ddps() -> None:
    runs = {"ddp": [run(0.1, 2.6), run(0.1, 2.4)], "sync": [run(0.1, 2.7), run(0.1, 2.6)], "x": [run(0.2, 2.0)] * 2}
    found = summed_up(runs | {"broken": []}, None, seeds=2)
    assert list(found["sides"]) == ["x", "ddp", "sync"]
    assert found["target_loss"] == pytest.approx(2.5)
    ddp, sync = found["sides"]["ddp"], found["sides"]["sync"]
    assert (ddp["loss_low"], ddp["loss_high"], ddp["reached_runs"]) == (2.4, 2.6, 1)
    assert sync["reached_runs"] == 0
    assert "target_s" not in sync
    assert "target_loss" not in summed_up({"x": runs["x"]}, None, seeds=2)
    assert summed_up({"x": runs["x"]}, 3.0, seeds=2)["sides"]["x"]["target_s"] == pytest.approx(7.5)


@pytest.mark.parametrize("program", ["ip", "tc"])
def test_without_namespaces_or_commands_it_says_what_is_missing(bench: Any, program: str) -> None:
    (bench.folder / "bin").mkdir()
    for name in {"ip", "tc"} - {program}:
        (bench.folder / "bin" / name).write_text("#!/bin/sh\n")
        (bench.folder / "bin" / name).chmod(0o755)
    done = bench.run("race", PATH=str(bench.folder / "bin"))
    assert done.returncode == 2
    missing = f"the command {program}" if os.geteuid() == 0 else "need root"
    assert missing in done.stderr


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith("psrace")]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_race_over_limited_links_ends_with_a_table_and_no_namespace(bench: Any) -> None:
    if (why := why_not()) is not None:
        pytest.skip(why)
    bench.deadline_s = 400
    report, table = bench.measure(
        "race --quick --seconds 6 --bandwidth 200mbit --latency 4ms --baselines ddp,torchft --mode diloco-q4 --target 1"
    )
    check_numbers(report["results"])
    sides = report["results"]["sides"]
    assert set(sides) >= {"ddp", "diloco-q4"}
    assert all(side["reached_runs"] == 0 and len(side["curve"]) == NUM_SAMPLES for side in sides.values())
    assert 0 < sides["diloco-q4"]["link_mb"] < sides["ddp"]["link_mb"] < 2 * 200 / 8 * 8
    assert "not reached" in table
    assert "torchft: NOT INSTALLED" in table or "torchft" in sides


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_removes_the_namespaces(bench: Any) -> None:
    if (why := why_not()) is not None:
        pytest.skip(why)
    process = bench.start("race", "--quick", "--seconds", "60", "--baselines", "ddp", "--mode", "sync")
    mine = f"psrace{process.pid}"
    deadline = time.monotonic() + bench.deadline_s
    while len([line for line in namespaces() if line.startswith(mine)]) < 3 or len(bench.left()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not [line for line in namespaces() if line.startswith(mine)]
    while bench.left():  # those that end when their parent does may still be ending
        assert time.monotonic() < deadline
        time.sleep(0.1)


OPTIONS = RaceOptions(100, None, 20, 2, 10, (0.1, 0.2), 3, False, None, ("sync",))


def test_every_rate_is_tried_once_and_the_best_with_every_seed() -> None:
    record = Record(OPTIONS)
    losses = {("sync", 0.1): 2.0, ("sync", 0.2): 3.0, ("ddp", 0.1): 4.0, ("ddp", 0.2): 1.0}
    made = []
    for side, lr, seed in _turns(OPTIONS, ["sync", "ddp"], record):
        made.append((side, lr, seed))
        record.note(side, replace(run(lr, losses[side, lr]), seed=seed), lr, seed)
    assert made[:4] == [("sync", 0.1, 0), ("ddp", 0.1, 0), ("sync", 0.2, 0), ("ddp", 0.2, 0)]
    assert made[4:] == [("sync", 0.1, 1), ("ddp", 0.2, 1), ("sync", 0.1, 2), ("ddp", 0.2, 2)]
    assert summed_up(record.runs, None, 3)["target_loss"] == 1.0


def test_an_interrupted_race_goes_on_where_it_was(tmp_path: Path) -> None:
    options = replace(OPTIONS, resume=str(tmp_path / "race.jsonl"))
    first = Record(options)
    first.load()
    first.note("sync", run(0.1, 2.0), 0.1, 0)
    first.note("ddp", "failed: it ended early", 0.1, 0)
    again = Record(options)
    again.load()
    assert again.runs == {"sync": [run(0.1, 2.0)]}
    assert list(_turns(options, ["sync", "ddp"], again))[:2] == [("sync", 0.2, 0), ("ddp", 0.2, 0)]
    with pytest.raises(UsageError, match="a race with seconds 10, and this one has 20"):
        Record(replace(options, seconds=20)).load()
    (tmp_path / "race.jsonl").write_text("what\n")
    with pytest.raises(UsageError, match="not a file of ps-bench race"):
        Record(options).load()
