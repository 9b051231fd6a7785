"""Data that are not divided among the ranks, or cannot be, are told to the user."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paramserver.tests.cluster import Cluster, Process, end_well
from paramserver.tests.scripts.test_length import EPOCHS

OWN_LOADER = Path(__file__).parent / "ordinary" / "own_loader.py"


def own_loaders(cluster: Cluster, mode: str, *envs: dict[str, str]) -> tuple[Process, list[Process]]:
    """Each rank's script has a loader of its own; all have ended well."""
    flags = ("--local-steps", "2") if mode in ("localsgd", "diloco", "async_diloco") else ()
    together = ("--set", f"policy.min_workers={len(envs)}")  # and no rank is through before another begins
    server = cluster.server("--mode", mode, "--workers", str(len(envs)), "--steps", "4", *together, *flags)
    ranks = [cluster.script(rank, OWN_LOADER, **{"STEP_S": "0.2", **env}) for rank, env in enumerate(envs)]
    end_well(*ranks, server)
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
    ranks = [cluster.script(rank, EPOCHS, "1", NUM="1") for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "the data set holds 1 sample; 2 workers need 2 or more" in ranks[0].output
    server.signal(signal.SIGTERM)
    server.wait()
