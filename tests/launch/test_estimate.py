"""`ps-launch --estimate`: a few real steps, and what all would take and cost."""

from __future__ import annotations

import re
import signal

import pytest

from paramserver.common.reporting.status import Status, WorkerStatus
from paramserver.common.reporting.summary import Summary
from paramserver.launch import estimate
from paramserver.tests.cluster import Cluster


@pytest.mark.slow
def test_an_estimate_leaves_nothing_behind(cluster: Cluster) -> None:
    result = cluster.command(
        "launch", "-n", "2", "--task", "xor", "--mode", "sync,localsgd", "--steps", "100000", "--estimate", "--save",
        "w.safetensors", "--checkpoint-dir", "snapshots", "--set", "cost.per_hour=36", "--set", "slowdown.base_s=0.02",
        "--local-steps", "4", "--set", "policy.backup_workers=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r"(sync|localsgd) ", line)]
    assert [row[0] for row in rows] == ["sync", "localsgd"]
    assert len(re.findall(r"a server and 2 workers", result.stderr)) == 2, "one short run of each mode"
    last = result.stdout.strip().splitlines()[-1]
    assert re.match(r"100,000 steps take about .* in (sync|localsgd), plus the time to start; .* times as long", last)
    for row in rows:
        assert 20 <= float(row[1].replace(",", "")) < 200  # ms: each step sleeps 20
        cost = float(row[row.index("USD") - 1].replace(",", ""))
        assert 20.0 <= cost < 200.0  # 1 cent a second
    assert not (cluster.folder / "w.safetensors").exists() and not (cluster.folder / "snapshots").exists()


def status(elapsed_s: float, step: int) -> Status:
    return Status(mode="sync", elapsed_s=elapsed_s, step=step)


def test_a_short_run_ends_when_its_pace_is_steady() -> None:
    enough = estimate.Enough(least=2)
    assert not enough(status(1.0, 1)), "its first step loads and allocates"
    found = [enough(status(*item)) for item in ((2.0, 4), (3.0, 14), (4.0, 24), (5.0, 34), (6.0, 44))]
    assert found == [False, False, False, True, True]
    enough = estimate.Enough(least=2)
    uneven = [enough(status(float(at), at * at)) for at in range(2, 22)]
    assert uneven == [False] * 18 + [True, True], "after 20 s at any rate"
    assert not estimate.Enough(least=64)(status(30.0, 63)), "two rounds, however long they take"


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_bytes_that_travel_once_are_left_out(num_workers: int) -> None:
    """60 rounds of 1,000 bytes each way; the weights once up, and once down to each."""
    workers = [
        WorkerStatus(
            rank=rank, training_steps=60, contributions=60, bytes_sent=60_000 + 1_000 * (rank == 0),
            bytes_received=61_000,
        )
        for rank in range(num_workers)
    ]  # fmt: skip
    summary = Summary(mode="sync", local_steps=1, staleness_bound=0, version=60, workers=workers)
    assert estimate.bytes_once(summary) == pytest.approx(1_000 * (num_workers + 1))
    assert estimate.steps_taken(summary, 60) == 60


def test_the_closing_sentence() -> None:
    text = estimate.sentence({"sync": 120.0, "localsgd": 40.0}, 1000)
    assert text == "1,000 steps take about 40 s in localsgd, plus the time to start; sync takes 3.0 times as long."
    assert estimate.sentence({"sync": 3.0}, 10) == "10 steps take about 3.0 s in sync, plus the time to start."


@pytest.mark.slow
def test_ctrl_c_shows_the_modes_that_were_estimated(cluster: Cluster) -> None:
    flags = ("-n", "2", "--task", "xor", "--mode", "localsgd,sync", "--steps", "1000", "--set", "slowdown.base_s=1")
    process = cluster.start("estimate", "-m", "paramserver.launch", *flags, "--estimate", "--local-steps", "1",
                            PS_LOG__FORMAT="text")  # fmt: skip
    process.until(lambda: re.search(r"step [1-3]/60", process.output) is not None, "some steps")
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.output
    assert "Traceback" not in process.output
    assert "1,000 steps take about" in process.output and "ended: 1 of 2 modes were estimated" in process.output


def test_what_cannot_be_estimated_is_said(cluster: Cluster) -> None:
    result = cluster.command("launch", "-n", "2", "--task", "xor", "--epochs", "3", "--estimate")
    assert result.returncode == 2
    assert "of a number of epochs, is unknown" in result.stderr and "--steps N" in result.stderr
