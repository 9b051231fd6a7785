"""A server of several processes: the same results as one, each contribution applied once on all or on none."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import at_gates, end_well

from .test_recovery import applied

STEPS = 25
SNAPSHOTS = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "5")
TCP = ("--set", "server.shared_memory=false")


def _start(cluster, mode: str, num_workers: int, shards: int, *flags: str):
    return cluster.server(
        "--mode", mode, "--workers", str(num_workers), "--steps", str(STEPS), "--save", "w.safetensors",
        "--summary", "s.json", "--shards", str(shards), "--set", "policy.weighting=equal", *flags,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("async", TCP),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in [("async", ()), ("ssp", ()), ("sync", TCP)]),
    ],
)
def test_every_contribution_is_applied_once_on_every_shard(cluster, mode, transport):
    """The rows of all workers, and a padding that counts steps, lie across three shards."""
    server = _start(cluster, mode, 2, 3, *transport)
    shards = cluster.shards(3)
    workers = [cluster.script(rank, "onehot.py", str(STEPS), PADDING="100000") for rank in range(2)]
    end_well(*workers, server, *shards)
    share = 1.0 if mode != "sync" else 0.5
    assert torch.allclose(applied(cluster.folder / "w.safetensors", 2), torch.full((2, STEPS), share))
    padding = load_file(cluster.folder / "w.safetensors")["padding"]
    assert torch.equal(padding, torch.full((100_000,), -STEPS * (2.0 if mode != "sync" else 1.0)))
    summary = cluster.summary()
    num_bytes = [shard["bytes"]["weights"] for shard in summary["shards"]]
    assert len(num_bytes) == 3 and max(num_bytes) <= 1.1 * sum(num_bytes) / 3


def _at_gate(cluster, step: str):
    """A worker that waits in this step for the file `go`."""
    worker = cluster.script(0, "onehot.py", str(STEPS), "go", step, PADDING="3000")
    at_gates(worker)
    return worker


@pytest.mark.slow
def test_a_mean_is_clipped_once_where_a_shard_is_killed_in_the_middle(cluster):
    """Every gradient was a one and 3,000 ones: its norm is known, and every step was 0.01 long."""
    flags = (*SNAPSHOTS, "--clip-norm", "0.01")
    server = _start(cluster, "sync", 1, 2, *flags)
    shard = cluster.shard(1, 2, *SNAPSHOTS)
    worker = _at_gate(cluster, "12")  # a loop that has ended before the loss cannot go back with it
    server.snapshot()
    shard.signal(signal.SIGKILL)
    (cluster.folder / "go").touch()
    shard.wait()
    server.event("shard_lost")
    shard = cluster.shard(1, 2, *SNAPSHOTS)
    end_well(worker, server, shard)
    found = load_file(cluster.folder / "w.safetensors")
    step = 0.01 / 3001**0.5
    torch.testing.assert_close(found["seen"][:STEPS], torch.full((STEPS,), -step), rtol=1e-4, atol=0)
    torch.testing.assert_close(found["padding"], torch.full((3000,), -STEPS * step), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_snapshots_restore_onto_another_number_of_shards(cluster, before, after):
    flags = (*SNAPSHOTS, "--optimizer", "adam", "--task", "digits")
    server = _start(cluster, "sync", 1, before, *flags)
    others = cluster.shards(before, *SNAPSHOTS)
    end_well(cluster.worker(0), server, *others)
    ended = load_file(cluster.folder / "w.safetensors")
    again = cluster.server(
        "--mode", "sync", "--workers", "1", "--steps", str(STEPS + 10), "--shards", str(after), *flags,
        "--save", "again.safetensors", "--set", "policy.weighting=equal",
    )  # fmt: skip
    others = cluster.shards(after, *SNAPSHOTS)
    end_well(cluster.worker(0), again, *others)
    resumed = again.event("resumed")
    assert resumed["version"] == STEPS
    assert again.event("resharded")["shards"] == before
    whole = cluster.server(
        "--mode", "sync", "--workers", "1", "--steps", str(STEPS + 10), "--optimizer", "adam", "--task", "digits",
        "--save", "whole.safetensors", "--set", "policy.weighting=equal",
    )  # fmt: skip
    end_well(cluster.worker(0), whole)
    expected, found = (load_file(cluster.folder / name) for name in ("whole.safetensors", "again.safetensors"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(not torch.equal(ended[name], found[name]) for name in ended)


# ---- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_missing_shard_is_named_to_whoever_waits(cluster):
    server = _start(cluster, "sync", 1, 3, "--set", "server.status_interval_s=0.1")
    shard = cluster.shard(2, 3)
    worker = cluster.script(0, "onehot.py", str(STEPS))
    server.event("shard_joined")
    message = "shard 1 of 3 to join (ps-server --shard 1 --shards 3"
    server.until(lambda: any(message in status["waiting"] for status in server.events("status")), "what it waits for")
    third = cluster.shard(1, 3)
    end_well(worker, server, shard, third)


@pytest.mark.slow
def test_a_server_that_still_waits_for_a_shard_is_stopped_without_a_traceback(cluster):
    server = _start(cluster, "sync", 1, 2)
    worker = cluster.script(0, "onehot.py", str(STEPS))
    worker.event("waiting")
    server.signal(signal.SIGTERM)
    assert server.wait() == 143
    assert "Traceback" not in server.output


@pytest.mark.slow
def test_a_shard_lost_without_snapshots_ends_the_run(cluster):
    server = _start(cluster, "async", 1, 2)
    shard = cluster.shard(1, 2)
    _at_gate(cluster, "5")
    shard.signal(signal.SIGKILL)
    assert server.wait() == 15
    assert "shard 1 was lost at version" in server.output and "--checkpoint-dir" in server.output


@pytest.mark.parametrize(
    ("shards", "words"),
    [("2", "it is shard 1 of 3; this server has 2 shards, 0 to 1"), ("1", "this server is one process")],
)
def test_a_shard_of_another_division_is_refused(cluster, shards, words):
    cluster.server("--mode", "async", "--shards", shards)
    where = ("--coordinator", cluster.address, "--listen", "127.0.0.1:0")
    found = cluster.command("ps", "--shard", "1", "--shards", "3", *where)
    assert found.returncode == 12, found.stderr
    assert words in found.stderr and "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_worker_that_calls_on_a_shard_is_sent_to_the_coordinator(cluster):
    _start(cluster, "async", 1, 2)
    shard = cluster.shard(1, 2)
    address = shard.event("listening")["address"]
    found = cluster.command("worker", "--server", address, "--task", "xor")
    assert found.returncode == 12, found.stderr
    assert "workers join the coordinator" in found.stderr and cluster.address in found.stderr


@pytest.mark.slow
def test_a_shard_without_a_coordinator_gives_up(cluster):
    found = cluster.command("ps", "--shard", "1", "--shards", "2", "--coordinator", "127.0.0.1:1", "--listen",
                            "127.0.0.1:0", "--set", "worker.give_up_s=1")  # fmt: skip
    assert found.returncode == 15
    assert "shard 1 could not register with a coordinator at 127.0.0.1:1" in found.stderr
