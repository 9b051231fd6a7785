"""Process groups and all-reduce, as far as one GPU allows. NCCL takes one process for each GPU: so over NCCL there is
one process, and two that share a GPU average over Gloo and say why."""

from __future__ import annotations

import pytest

from paramserver.tests.cluster import Cluster
from paramserver.tests.gpu.conftest import events, launched, task

pytestmark = pytest.mark.gpu

STEPS = "40"
LEARNED = 0.5
SHARE = "2 processes share 1 GPU, and NCCL takes one process for each GPU"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_reduce(cluster: Cluster, device: str, num_workers: int) -> None:
    flags = ("-n", str(num_workers), "--mode", "allreduce", "--steps", STEPS, "--device", device)
    summary, lines = launched(cluster, *task(device), *flags)
    assert summary["version"] == int(STEPS) and summary["final"]["loss"] < LEARNED
    over_nccl = device == "cuda" and num_workers == 1
    assert {line["backend"] for line in events(lines, "group")} == {"nccl" if over_nccl else "gloo"}
    reasons = {line["reason"] for line in events(lines, "not_over_nccl")}
    assert reasons == ({SHARE} if device == "cuda" and num_workers == 2 else set())


def test_a_replica_group_of_two_processes(cluster: Cluster, device: str) -> None:
    flags = ("-n", "1", "--group", "2", "--mode", "sync", "--steps", STEPS, "--device", device)
    summary, lines = launched(cluster, *task(device), *flags)
    assert summary["final"]["loss"] < LEARNED
    assert {line["backend"] for line in events(lines, "worker_group")} == {"gloo"}
    reasons = {line["reason"] for line in events(lines, "not_over_nccl")}
    assert reasons == ({SHARE} if device == "cuda" else set())


def test_a_replica_group_of_one_process_over_nccl(cluster: Cluster, device: str) -> None:
    server = cluster.server(
        "--mode", "sync", "--workers", "1", "--steps", STEPS, "--lr", "0.05", "--set=output.store=false"
    )
    worker = cluster.start(
        "member", "-m", "paramserver.worker.replica_group", "1", "-m", "paramserver.worker", "--rank", "0", "--server",
        cluster.address, *task(device), "--device", device, PS_WORKER__GROUP="true", PS_LOG__LEVEL="debug",
    )  # fmt: skip
    assert worker.wait() == 0, worker.output
    assert server.wait() == 0, server.output
    assert worker.event("worker_group")["backend"] == ("nccl" if device == "cuda" else "gloo")
    assert server.events("summary")[-1]["final"]["loss"] < LEARNED
