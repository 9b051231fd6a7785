"""diloco over real processes ends where plain torch does, whoever is killed meanwhile; async_diloco loses nothing."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, at_gates, end_well
from paramserver.tests.loopback import test_diloco_overlap as overlap
from paramserver.tests.loopback.test_diloco_overlap import LR, STEPS, assert_is, reference

H = 5
pytestmark = pytest.mark.slow


def flags(num_workers: int, *more: str) -> tuple[str, ...]:
    return overlap.flags(H, 1, 0, "--workers", str(num_workers), *more)


def test_unequal_workers_equal_plain_torch_and_shards_change_no_bit(cluster: Cluster) -> None:
    ends = []
    for shards in (1, 3):
        server = cluster.server(*flags(2, "--shards", str(shards)))
        others = cluster.shards(shards)
        workers = [cluster.script(rank, "outer.py", "adamw") for rank in range(2)]
        end_well(*workers, server, *others)
        assert server.events("outer_optimizer")[0]["because"] == "as policy.outer_momentum says"
        assert_is(cluster, reference("adamw", H, 1, 0, {0: (0, 1)}))
        ends.append(load_file(cluster.folder / "w.safetensors"))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_killed_worker_and_a_killed_server_change_nothing(cluster: Cluster) -> None:
    """The outer momentum is in the snapshot; steps of a round that was lost are taken again."""
    snapshots = ("--checkpoint-dir", "snapshots", "--checkpoint-every", "5", "--set", "policy.min_workers=2")
    server = cluster.server(*flags(2, *snapshots))
    gate = cluster.folder / "go"
    first = cluster.script(0, "outer.py", "sgd", str(gate), "12")
    killed = cluster.script(1, "outer.py", "sgd", str(gate), "12")
    at_gates(first, killed)
    killed.signal(signal.SIGKILL)
    server.event("left")
    server.snapshot()
    server.kill()
    second = cluster.server(*flags(2, *snapshots, "--listen", cluster.address))
    again = cluster.script(1, "outer.py", "sgd")
    gate.touch()
    end_well(first, again, second)
    assert second.event("resumed")["version"] > 0
    assert_is(cluster, reference("sgd", H, 1, 0, {0: (0, 1)}))


@pytest.mark.parametrize("more", [(), ("--delayed-update", "--overlap-steps", "2")], ids=["waiting", "going_on"])
def test_a_killed_worker_holds_up_nobody_and_nothing_is_lost(cluster: Cluster, more: tuple[str, ...]) -> None:
    """Rounds close without the one that is killed; a new process takes its remaining steps."""
    arguments = (
        "--mode", "async_diloco", *more, "--history", "h.jsonl", "--summary", "s.json", "--set", "server.absent_s=60",
    )  # fmt: skip
    server = cluster.server(*flags(3), *arguments)
    gate = cluster.folder / "go"
    killed = cluster.script(1, "outer.py", "sgd", str(gate), "12")
    others = [cluster.script(rank, "outer.py", "sgd") for rank in (0, 2)]
    at_gates(killed)
    for item in others:  # they have taken all their steps
        item.until(lambda process=item: "rank 1 to finish" in process.output, "end")
    killed.signal(signal.SIGKILL)
    again = cluster.script(1, "outer.py", "sgd")
    end_well(again, server, *others)
    checked = cluster.command("launch", "check", "h.jsonl")
    assert checked.returncode == 0, checked.stdout
    summary = cluster.summary()
    assert [row["rank"] for row in summary["workers"]] == [0, 1, 2]
    assert all(tensor.isfinite().all() for tensor in load_file(cluster.folder / "w.safetensors").values())
    steps = dict.fromkeys(range(3), 0)
    for line in map(json.loads, (cluster.folder / "h.jsonl").read_text().splitlines()):
        if line["op"] == "accept" and line["outcome"] == "accepted":
            steps[line["rank"]] += line["num_steps"]
    assert steps == dict.fromkeys(range(3), STEPS)


def test_delayed_momentum_is_the_same_bits_over_shards_and_after_a_kill_between_two_moves(cluster: Cluster) -> None:
    """Killed after two of three deltas: what they come to is in the snapshot, and so is how many they were."""
    arguments = flags(1, "--mode", "async_diloco", "--outer-lr", str(LR), "--outer-delay", "3")
    ends = []
    for shards, kills in ((3, False), (1, True)):
        folder = ("--checkpoint-dir", f"snapshots{len(ends)}", "--checkpoint-every", "1")
        server = cluster.server(*arguments, *folder, "--shards", str(shards))
        others = cluster.shards(shards, *folder[:2])
        gate = cluster.folder / f"go{len(ends)}"
        worker = cluster.script(0, "outer.py", "sgd", str(gate), "12")
        at_gates(worker)
        if kills:
            server.snapshot(2)
            server.kill()
            server = cluster.server(*arguments, *folder, "--listen", cluster.address)
        gate.touch()
        end_well(worker, server, *others)
        assert not kills or server.event("resumed")["version"] == 2
        ends.append(load_file(cluster.folder / "w.safetensors"))
        assert_is(cluster, reference("sgd", H, 1, 0, {0: (0,)}, delay=3))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("transports", ["", "grpc"], ids=["shared memory", "grpc"])
def test_work_that_came_too_late_is_in_the_next_round(cluster: Cluster, transports: str) -> None:
    """Raw as well: a weight for each step, and one that counts them. Every round has one contribution."""
    server = cluster.server(
        "--mode", "diloco", "--workers", "2", "--steps", "6", "--local-steps", "1", "--save", "w.safetensors",
        "--outer-momentum", "0", "--outer-lr", "1", "--set", "policy.backup_workers=1", "--summary", "s.json",
    )  # fmt: skip
    env = {"PADDING": "40000"} | ({"PS_WORKER__TRANSPORTS": transports} if transports else {})
    gates = [cluster.folder / f"gate-{rank}" for rank in range(2)]
    workers = [cluster.script(rank, "onehot.py", "6", str(gates[rank]), str(3 - 3 * rank), **env) for rank in range(2)]
    for worker in workers:
        at_gates(worker)
    gates[1].touch()
    server.event("finished")
    gates[0].touch()
    end_well(*workers, server)
    weights = load_file(cluster.folder / "w.safetensors")
    summary = cluster.summary()
    late = summary["workers"][1]
    assert (late["dropped"], late["contributions"], late["training_steps"], late["residuals_lost"]) == (1, 3, 6, 0)
    assert weights["seen"].view(-1, 6)[:2].sum(1).tolist() == [-3.0, -4.0], "the late one is in the round after"
    assert torch.equal(weights["padding"], torch.full((40_000,), -7.0))
