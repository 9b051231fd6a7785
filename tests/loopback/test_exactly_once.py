"""Every contribution is applied exactly once: the weights themselves count them (scripts/onehot.py)."""

from __future__ import annotations

import json

import pytest
import torch

from .test_recovery import applied

STEPS = 25


def _start(cluster, mode: str, num_workers: int, *flags: str):
    return cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(STEPS), "--save", "w.safetensors",
        "--summary", "s.json", "--set", "policy.weighting=equal", *flags,
    )  # fmt: skip


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
    assert torch.equal(applied(cluster.folder / "w.safetensors", 2), torch.ones(2, STEPS))
    summary = json.loads((cluster.folder / "s.json").read_text())
    assert [worker["restarts"] for worker in summary["workers"]] == [0, 1]


@pytest.mark.slow
def test_pull_every_contributes_every_step_and_fetches_weights_every_nth(cluster):
    server = _start(cluster, "async", 1, "--set", "policy.pull_every=5")
    worker = cluster.script(0, "onehot.py", str(STEPS))
    assert [worker.wait(), server.wait()] == [0, 0]
    assert torch.equal(applied(cluster.folder / "w.safetensors", 1), torch.ones(1, STEPS))
    row = json.loads((cluster.folder / "s.json").read_text())["workers"][0]
    assert row["staleness_max"] == 4  # alone, so all staleness is its own four steps without weights
    assert row["bytes_received"] < row["bytes_sent"] / 3
