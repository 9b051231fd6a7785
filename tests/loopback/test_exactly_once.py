"""Every contribution is applied exactly once: the weights themselves count them (scripts/onehot.py)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

STEPS = 25


def _applied(path, num_workers: int, steps: int = STEPS) -> torch.Tensor:
    """[num_workers, steps]: how often each contribution was applied."""
    return -load_file(path)["seen"].view(-1, steps)[:num_workers]


def _start(cluster, mode: str, num_workers: int, *flags: str):
    return cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(STEPS), "--save", "w.safetensors",
        "--summary", "s.json", "--set", "policy.weighting=equal", *flags,
    )  # fmt: skip


@pytest.mark.slow
def test_ssp_applies_every_contribution_once_and_keeps_its_bounds(cluster):
    bound = 2
    server = _start(cluster, "ssp", 3, "--staleness", str(bound))
    workers = [cluster.script(rank, "onehot.py", str(STEPS)) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert server.wait() == 0
    assert torch.equal(_applied(cluster.folder / "w.safetensors", 3), torch.ones(3, STEPS))
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert max(worker["lead_max"] for worker in summary["workers"]) <= bound + 1
    assert max(worker["staleness_max"] for worker in summary["workers"]) <= (2 * bound + 1) * 2
    assert summary["staleness_bound"] == bound


def test_sync_applies_the_mean_of_every_round_once(cluster):
    server = _start(cluster, "sync", 3)
    workers = [cluster.script(rank, "onehot.py", str(STEPS)) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert server.wait() == 0
    applied = _applied(cluster.folder / "w.safetensors", 3)
    assert torch.allclose(applied, torch.full((3, STEPS), 1 / 3), atol=1e-6)


@pytest.mark.slow
def test_sync_goes_on_without_a_killed_worker_at_once(cluster):
    """SIGKILL in the middle: the closed connection is noticed, the barrier re-forms, nothing is applied twice."""
    server = _start(cluster, "sync", 2)
    survivor = cluster.script(0, "onehot.py", str(STEPS))
    victim = cluster.script(1, "onehot.py", str(STEPS), str(cluster.folder / "never"), "10")
    victim.until(lambda: "at the gate" in victim.output, "gate")
    victim.kill()
    assert survivor.wait() == 0
    assert server.wait() == 0
    applied = _applied(cluster.folder / "w.safetensors", 2)
    assert torch.allclose(applied[0, :10], torch.full((10,), 0.5))
    assert torch.equal(applied[0, 10:], torch.ones(STEPS - 10))  # alone in its rounds from then on
    assert torch.equal(applied[1, 10:], torch.zeros(STEPS - 10))
    left = [event for event in server.events("left") if event["rank"] == 1]
    assert left[0]["reason"] == "connection lost"


def test_a_replacement_goes_on_at_the_dead_workers_step(cluster):
    server = _start(cluster, "async", 2)
    survivor = cluster.script(0, "onehot.py", str(STEPS), str(cluster.folder / "go"), "5")
    victim = cluster.script(1, "onehot.py", str(STEPS), str(cluster.folder / "never"), "10")
    victim.until(lambda: "at the gate" in victim.output, "gate")
    victim.kill()
    server.until(lambda: bool(server.events("left")), "departure")
    replacement = cluster.script(1, "onehot.py", str(STEPS))
    server.until(lambda: len(server.events("admitted")) == 3, "replacement")
    (cluster.folder / "go").touch()
    assert [survivor.wait(), replacement.wait(), server.wait()] == [0, 0, 0]
    assert torch.equal(_applied(cluster.folder / "w.safetensors", 2), torch.ones(2, STEPS))
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert [worker["restarts"] for worker in summary["workers"]] == [0, 1]


@pytest.mark.slow
def test_pull_every_contributes_every_step_and_fetches_weights_every_nth(cluster):
    server = _start(cluster, "async", 1, "--set", "policy.pull_every=5")
    worker = cluster.script(0, "onehot.py", str(STEPS))
    assert [worker.wait(), server.wait()] == [0, 0]
    assert torch.equal(_applied(cluster.folder / "w.safetensors", 1), torch.ones(1, STEPS))
    row = json.loads((cluster.folder / "s.json").read_text())["workers"][0]
    assert row["staleness_max"] == 4  # alone, so all staleness is its own four steps without weights
    assert row["bytes_received"] < row["bytes_sent"] / 3


@pytest.mark.slow
def test_a_late_worker_of_an_open_run_starts_at_the_slowest_step(cluster):
    """Without --workers anyone may join; a newcomer neither stalls the others nor repeats their steps."""
    server = cluster.server(
        "--mode", "ssp", "--staleness", "1", "--steps", str(STEPS), "--save", "w.safetensors",
        "--set", "policy.weighting=equal",
    )  # fmt: skip
    first = cluster.script(0, "onehot.py", str(STEPS), str(cluster.folder / "go"), "12")
    first.until(lambda: "at the gate" in first.output, "gate")
    second = cluster.script(1, "onehot.py", str(STEPS))
    server.until(lambda: len(server.events("admitted")) == 2, "second worker")
    (cluster.folder / "go").touch()
    assert [first.wait(), second.wait(), server.wait()] == [0, 0, 0]
    applied = _applied(cluster.folder / "w.safetensors", 2)
    assert torch.equal(applied[0], torch.ones(STEPS))
    assert torch.equal(applied[1], torch.cat([torch.zeros(12), torch.ones(STEPS - 12)]))
