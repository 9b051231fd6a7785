"""Whoever leaves its loop finishes early, or leaves as a failure; nobody waits for it, and the run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process, end_well

LOOP = Path(__file__).parent / "ends" / "loop.py"
MODES = {
    "sync": ("--mode", "sync"),
    "async": ("--mode", "async"),
    "ssp": ("--mode", "ssp", "--staleness", "1"),
    "localsgd": ("--mode", "localsgd", "--local-steps", "4"),
}
STEPS = 30
OUTPUTS = ("--save", "w.safetensors", "--summary", "s.json")


def start(cluster: Cluster, mode: str, *args: str, **env: str) -> tuple[Process, list[Process]]:
    server = cluster.server(*MODES[mode], "--workers", "2", "--steps", str(STEPS), *OUTPUTS)
    return server, [cluster.script(rank, LOOP, *args, **env) for rank in range(2)]


def sentences(process: Process, text: str) -> str:
    """The word after `rank N WHAT`."""
    lines = [line.split() for line in process.output.splitlines() if line.startswith("rank ")]
    return next((words[3] for words in lines if words[2] == text), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "plain", "code"),
    [("break", "", 0), ("return", "1", 0), ("0", "", 0), ("0", "1", 0),
     ("raise", "", 1), ("raise", "1", 1), ("3", "", 3), ("3", "1", 3)],
)  # fmt: skip
def test_who_leaves_has_finished_or_is_lost_and_the_rest_goes_on(
    cluster: Cluster, how: str, plain: str, code: int
) -> None:
    server, workers = start(cluster, "sync", how, "5", PLAIN=plain)
    assert [process.wait() for process in (*workers, server)] == [0, code, 0], server.output
    assert sentences(workers[0], "took") == str(STEPS)
    reasons = [event["reason"] for event in server.events("left") if event["rank"] == 1]
    assert (reasons == ["connection lost"]) == bool(code), reasons


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finish", "break"])
def test_local_steps_since_the_last_average_are_contributed_by_who_leaves(cluster: Cluster, how: str) -> None:
    kept = ("--checkpoint-dir", "snapshots")
    server = cluster.server(*MODES["localsgd"], "--steps", str(STEPS), *OUTPUTS, *kept)
    worker = cluster.script(1, LOOP, how, "6")
    end_well(worker, server)
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        (plain(torch.ones(4, 4)) - 1).square().mean().backward()
        optimizer.step()
    assert torch.equal(load_file(cluster.folder / "w.safetensors")["weight"], plain.weight)
    (manifest,) = cluster.folder.glob("snapshots/snapshot-*2-*/manifest.json")
    assert {rank: row[1] for rank, row in json.loads(manifest.read_text())["rows"].items()} == {"1": 6}


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        pytest.param(mode, how, marks=() if (mode, how) == ("sync", "stop") else pytest.mark.slow)
        for mode in MODES
        for how in ("stop", "stop_break")
    ],
)
def test_one_stops_the_run_for_all(cluster: Cluster, mode: str, how: str) -> None:
    # Slowly where the other one does not wait: it would be through before the word has come.
    server, workers = start(cluster, mode, how, "5", PS_SLOWDOWN__BASE_S="0.1" if mode == "async" else "0")
    end_well(*workers, server)
    assert all(int(sentences(worker, "took")) < STEPS for worker in workers)
    assert sentences(workers[0], "has") == sentences(workers[1], "has") != ""
    assert cluster.summary()["ended_by"] == "stopped by rank 1: good enough"
    if mode == "sync":  # the round that was open is the last
        assert [sentences(worker, "took") for worker in workers] == ["6", "6" if how == "stop" else "5"]
        assert cluster.summary()["version"] == 6
    assert (cluster.folder / "w.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("after", "plain"), [("raise", ""), ("raise", "1"), ("kill", ""), ("3", ""), ("3", "1")])
def test_what_fails_in_the_evaluation_fails_the_run(cluster: Cluster, after: str, plain: str) -> None:
    flags = ("--steps", "10", *MODES["sync"], *OUTPUTS, "--checkpoint-dir", "snapshots")
    flags += ("--script", str(LOOP), "--", "none", "99", after)
    done = cluster.command("launch", "-n", "2", *flags, PLAIN=plain)
    shown = done.stdout + done.stderr
    assert done.returncode == {"raise": 1, "kill": 1, "3": 3}[after], shown
    assert shown.count("Traceback") == (after == "raise"), shown
    assert (cluster.folder / "w.safetensors").exists()
    why = {
        "raise": "rank 0 failed after the last training step: ValueError: no such metric",
        "kill": "rank 0 was lost while it evaluated the final weights: connection lost",
        "3": "rank 0 failed after the last training step: exit code 3",
    }[after]
    assert cluster.summary()["ended_by"] == why
    if after != "kill":  # the launcher may see the end of a process before the server does, and says what it would do
        assert "started again" not in shown


@pytest.mark.slow
def test_who_fails_near_the_end_is_not_waited_for_and_fails_the_job(cluster: Cluster) -> None:
    """It is started again, and nothing is left of the run by then. It would look for the server for an hour."""
    script = ("--script", str(LOOP.with_name("late.py")))
    flags = ("--steps", "30", *MODES["async"], "--save", "w.safetensors", *script)
    done = cluster.command("launch", "-n", "2", *flags, PS_WORKER__GIVE_UP_S="3600")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "started again in" in done.stderr and done.stderr.count("Traceback") == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("ps-launch: worker 1 failed: ValueError: in the middle ("), done.stderr
    assert "the server ended with exit code 0: the run is complete; asked to end: worker 1" in done.stderr


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_buffers_that_are_changed_after_the_last_step_are_not_replaced_without_a_word(
    cluster: Cluster, when: str
) -> None:
    server = cluster.server("--mode", "sync", "--workers", "1")
    worker = cluster.script(0, LOOP.with_name("batchnorm.py"), when)
    end_well(worker, server)
    found = worker.events("buffers_replaced")
    assert [event["tensors"] for event in found] == ["'1.running_mean' and 2 more"] * (when == "before")
    assert all("update_bn" in event["fix"] for event in found)
