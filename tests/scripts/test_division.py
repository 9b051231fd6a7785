"""What `session.shard()` gives makes up the union batch of each step, whatever divides, and is told to the run.

Step s of an epoch is made of `order[s*W*B : (s+1)*W*B]` of the epoch's order: of what a DataLoader with batches of W*B
gives when it is asked for that order.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from paramserver.tests.cluster import Cluster, Process, at_gates

SCRIPT = Path(__file__).parent / "ordinary" / "divided.py"


def scripts(cluster: Cluster, num: int, out: str, **env: str) -> list[Process]:
    return [cluster.script(rank, SCRIPT, OUT=str(cluster.folder / f"{out}{rank}.pt"), **env) for rank in range(num)]


def accumulated(cluster: Cluster, name: str, *flags: str, **env: str) -> tuple[Process, list[Process]]:
    server = cluster.server(
        "--mode", "sync", "--workers", "2", "--steps", "40", "--checkpoint-dir", name, "--checkpoint-every", "5", *flags
    )  # fmt: skip
    return server, scripts(cluster, 2, name, NUM="53", ACCUMULATE="4", DROPOUT="0.5", **env)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["", "1"])
def test_a_script_that_accumulates_ends_in_the_same_bits_when_it_is_killed(cluster: Cluster, ahead: str) -> None:
    server, ranks = accumulated(cluster, "whole", AHEAD=ahead)
    assert [rank.wait() for rank in (*ranks, server)] == [0, 0, 0], ranks[0].output

    # Stopped in the middle of an accumulation after 15 steps. A snapshot holds step 10 or 15.
    server, ranks = accumulated(cluster, "killed", AHEAD=ahead, GATE=str(cluster.folder / "never"), GATE_AT="62")
    at_gates(ranks)
    server.until(lambda: any(event["version"] >= 10 for event in server.events("snapshot")), "snapshot")
    for process in (*ranks, server):
        process.kill()

    # The second time a worker alone is killed, and replaced.
    gate = str(cluster.folder / "go")
    server, ranks = accumulated(cluster, "killed", AHEAD=ahead, GATE=gate, GATE_AT="30")
    at_gates(ranks)
    ranks[1].kill()
    server.until(lambda: any(event["rank"] == 1 for event in server.events("left")), "leave")
    second = cluster.script(
        1, SCRIPT, OUT=str(cluster.folder / "killed1.pt"), NUM="53", ACCUMULATE="4", DROPOUT="0.5", AHEAD=ahead
    )
    second.until(lambda: "batches" in second.output, "start")
    Path(gate).touch()
    assert [process.wait() for process in (ranks[0], second, server)] == [0, 0, 0], second.output
    for rank in range(2):
        whole, killed = (torch.load(cluster.folder / f"{name}{rank}.pt") for name in ("whole", "killed"))
        assert all(torch.equal(whole[name], killed[name]) for name in whole)


def own_loaders(cluster: Cluster, mode: str, *envs: dict[str, str]) -> tuple[Process, list[Process]]:
    """Each rank's script has a loader of its own; all have ended well."""
    flags = ("--local-steps", "2") if mode in ("localsgd", "diloco", "async_diloco") else ()
    together = ("--set", f"policy.min_workers={len(envs)}")  # and no rank is through before another begins
    server = cluster.server("--mode", mode, "--workers", str(len(envs)), "--steps", "4", *together, *flags)
    script = SCRIPT.with_name("own_loader.py")
    ranks = [cluster.script(rank, script, **{"STEP_S": "0.2", **env}) for rank, env in enumerate(envs)]
    assert [rank.wait() for rank in (*ranks, server)] == [0] * (len(envs) + 1), ranks[0].output
    return server, ranks


@pytest.mark.parametrize(
    ("mode", "env"),
    [
        ("sync", {}),
        *(
            pytest.param(mode, env, marks=pytest.mark.slow)
            for mode, env in (
                ("async", {}), ("buffered", {}), ("ssp", {}), ("dssp", {}), ("localsgd", {}), ("diloco", {}),
                ("async_diloco", {}), ("allreduce", {}), ("allreduce", {"WIDTH": "100000"}),
            )
        ),
    ],
)  # fmt: skip
def test_ranks_that_train_on_the_same_batches_are_told(cluster: Cluster, mode: str, env: dict[str, str]) -> None:
    """In the server's log once, and in that of each of them."""
    server, ranks = own_loaders(cluster, mode, env, env)
    for process in (server, *ranks):
        (event,) = process.events("same_batches")
        assert sorted(event["ranks"]) == [0, 1] and event["level"] == "warning"
        assert "equal to the bit" in event["meaning"] and "same batches" in event["meaning"]
        assert all(way in event["fix"] for way in ("session.shard(", "DistributedSampler", "another seed"))


def test_fewer_samples_than_workers_end_the_script_with_a_sentence(cluster: Cluster) -> None:
    server = cluster.server("--mode", "sync", "--workers", "2", "--steps", "4")
    ranks = scripts(cluster, 2, "w", NUM="1")
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "the data set holds 1 sample; 2 workers need 2 or more" in ranks[0].output
    server.signal(signal.SIGTERM)
    server.wait()
