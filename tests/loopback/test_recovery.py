"""Every contribution is applied exactly once, also where processes are killed: the weights count them (onehot.py)."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import at_gates, end_well

STEPS = 25


def applied(path, num_workers: int, steps: int = STEPS) -> torch.Tensor:
    """[num_workers, steps]: how often each contribution was applied."""
    return -load_file(path)["seen"].view(-1, steps)[:num_workers]


def start(cluster, mode: str, num_workers: int, *flags: str, steps: int = STEPS):
    return cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(steps), "--save", "w.safetensors",
        "--set", "policy.weighting=equal", "--history", "h.jsonl", "--summary", "s.json", *flags,
    )  # fmt: skip


def test_a_replacement_goes_on_at_the_dead_workers_step(cluster):
    server = start(cluster, "async", 2)
    survivor = cluster.script(0, "onehot.py", str(STEPS), str(cluster.folder / "go"), "5")
    victim = cluster.script(1, "onehot.py", str(STEPS), str(cluster.folder / "never"), "10")
    at_gates(victim)
    victim.kill()
    server.event("left")
    replacement = cluster.script(1, "onehot.py", str(STEPS))
    server.until(lambda: len(server.events("admitted")) == 3, "replacement")
    (cluster.folder / "go").touch()
    end_well(survivor, replacement, server)
    assert torch.equal(applied(cluster.folder / "w.safetensors", 2), torch.ones(2, STEPS))
    assert [worker["restarts"] for worker in cluster.summary()["workers"]] == [0, 1]


@pytest.mark.slow
def test_pull_every_contributes_every_step_and_fetches_weights_every_nth(cluster):
    server = start(cluster, "async", 1, "--set", "policy.pull_every=5")
    worker = cluster.script(0, "onehot.py", str(STEPS))
    end_well(worker, server)
    assert torch.equal(applied(cluster.folder / "w.safetensors", 1), torch.ones(1, STEPS))
    row = cluster.summary()["workers"][0]
    assert row["staleness_max"] == 4  # alone, so all staleness is its own four steps without weights
    assert row["bytes_received"] < row["bytes_sent"] / 3


def test_a_worker_whose_server_goes_back_after_its_loop_is_started_again(cluster):
    """Nobody has set the number of steps, so the worker's own loop has ended: its lost steps were not taken again."""
    flags = ("--mode", "async", "--workers", "2", "--save", "w.safetensors", "--history", "h.jsonl")
    flags += ("--checkpoint-dir", "snapshots", "--checkpoint-every", "5", "--set", "server.absent_s=60")
    server, gate = cluster.server(*flags), cluster.folder / "go"
    first, second = (cluster.script(rank, "ending.py", str(gate)) for rank in range(2))
    server.until(lambda: '"how":"finished"' in (cluster.folder / "h.jsonl").read_text(), "rank 0 has finished")
    server.event("snapshot")  # without one it would be another run
    server.kill()
    server = cluster.server(*flags, "--listen", cluster.address)
    gate.touch()
    assert first.wait() == 15, first.output + server.output
    assert re.search("the server was lost and went back to step [05] after this loop had ended", first.output)
    again = cluster.script(0, "ending.py", str(gate))
    end_well(again, second, server)
    assert torch.equal(load_file(cluster.folder / "w.safetensors")["seen"], torch.full((16,), -1.0))


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_says_so_and_ends_well(cluster):
    snapshots = ("--checkpoint-dir", "snapshots")
    server = start(cluster, "sync", 1, *snapshots)
    assert [cluster.script(0, "onehot.py", str(STEPS)).wait(), server.wait()] == [0, 0]
    (cluster.folder / "w.safetensors").unlink()
    again = start(cluster, "sync", 1, *snapshots)
    done = again.event("already_done")
    assert again.wait() == 0
    assert done["steps"] == STEPS
    for weights in (cluster.folder / done["weights"], cluster.folder / "w.safetensors"):
        assert torch.equal(applied(weights, 1), torch.ones(1, STEPS))
    longer = start(cluster, "sync", 1, *snapshots, steps=STEPS + 5)
    assert longer.events("already_done") == []


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_mode_counts_training_steps(cluster):
    """20 steps of two workers are 40 versions of async, which were taken for 40 rounds of sync: nothing was trained."""
    for mode, steps, version in (("async", 20, 40), ("sync", 30, 50), ("diloco", 46, 51), ("localsgd", 62, 53)):
        server = cluster.server(
            "--mode", mode, "--workers", "2", "--steps", str(steps), "--task", "linear", "--checkpoint-dir", "snapshots"
        )
        workers = [cluster.worker(rank) for rank in range(2)]
        end_well(*workers, server)
        assert server.events("snapshot")[-1]["version"] == version
        if mode == "sync":
            meaning = server.events("mode_changed")[0]["meaning"]
            assert meaning == "training steps are counted: 20 of 30 are done by the slowest rank, 10 are left"
