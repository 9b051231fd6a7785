"""Computing while an exchange is in flight: nothing is applied twice or lost, and all ends in good order.

A worker is held in mid-flight without any waiting for time to pass: with staleness 1 and rank 0 at its gate
before its first contribution, rank 1's first contribution is applied and not replied.
"""

from __future__ import annotations

import pytest
import torch

from paramserver.tests.cluster import at_gates, end_well
from paramserver.tests.faults.proxy import Proxy

from .test_recovery import applied

pytestmark = pytest.mark.slow

STEPS = 25


def _start(cluster, mode: str, num_workers: int, *flags: str):
    return cluster.server(
        "--mode", mode, "--delayed-update", "--workers", str(num_workers), "--steps", str(STEPS), "--save",
        "w.safetensors", "--summary", "s.json", "--set", "policy.weighting=equal",
        "--set", "server.status_interval_s=0.05", *flags,
    )  # fmt: skip


def _in_flight(cluster, server):
    """Two workers under ssp with staleness 1: the second computes its step 2 while its first is not replied."""
    first = cluster.script(0, "onehot.py", str(STEPS), str(cluster.folder / "go"), "0")
    second = cluster.script(1, "onehot.py", str(STEPS), str(cluster.folder / "go"), "1")
    at_gates(first, second)
    server.until(lambda: any(_is_waiting(status, 1) for status in server.events("status")), "contribution in flight")
    return first, second


def _is_waiting(status: dict, rank: int) -> bool:
    return any(row["rank"] == rank and row["state"] == "waiting" for row in status["workers"])


# ---- exactly once -----------------------------------------------------------------------------------


def test_a_killed_worker_leaves_nothing_twice_in_mid_flight(cluster):
    server = _start(cluster, "ssp", 2, "--staleness", "1")
    first, victim = _in_flight(cluster, server)
    victim.kill()
    server.event("left")
    replacement = cluster.script(1, "onehot.py", str(STEPS))
    server.until(lambda: len(server.events("joined")) == 3, "replacement")
    (cluster.folder / "go").touch()
    end_well(first, replacement, server)
    assert torch.equal(applied(cluster.folder / "w.safetensors", 2), torch.ones(2, STEPS))
    assert [row["training_steps"] for row in cluster.summary()["workers"]] == [STEPS, STEPS]


def test_a_lost_connection_in_mid_flight_is_rejoined_and_nothing_is_applied_twice(cluster):
    server = _start(cluster, "ssp", 2, "--staleness", "1", "--set", "policy.min_workers=2")  # nobody ends alone
    with Proxy(cluster.address) as proxy:
        cluster.address = proxy.address
        first, second = _in_flight(cluster, server)
        proxy.reset_all()
        server.until(lambda: len(server.events("left")) == 2, "departures")
        (cluster.folder / "go").touch()
        end_well(first, second, server)
    assert second.events("rejoined")
    assert torch.equal(applied(cluster.folder / "w.safetensors", 2), torch.ones(2, STEPS))
    assert [row["training_steps"] for row in cluster.summary()["workers"]] == [STEPS, STEPS]


# ---- localsgd ---------------------------------------------------------------------------------------


def _delayed_averaging(num_workers: int, steps: int, local_steps: int) -> tuple[list[list[float]], float]:
    """The weights every worker begins its steps with, and the last average, in plain arithmetic.

    The mean is kept as the server keeps it, m += (x - m) / n, so that equality is to the last bit.
    """
    begun: list[list[float]] = [[] for _ in range(num_workers)]
    now = [10.0] * num_workers
    sent: list[float] | None = None
    average = 10.0
    for step in range(steps):
        for rank in range(num_workers):
            begun[rank].append(now[rank])
            now[rank] -= 0.1 * ((rank + 1) * (now[rank] - rank))
        if (step + 1) % local_steps and step + 1 < steps:
            continue
        if sent is not None:  # the average of what was sent a round ago has come meanwhile
            now = [now[rank] - sent[rank] + average for rank in range(num_workers)]
        sent = list(now)
        average = 0.0
        for rank in range(num_workers):
            average += (sent[rank] - average) / (rank + 1)
    return begun, average


@pytest.mark.parametrize(("num_workers", "local_steps"), [(1, 1), (2, 1), (2, 4), (3, 7)])
def test_localsgd_goes_on_from_the_average_and_its_own_steps_since(cluster, num_workers, local_steps):
    server = _start(cluster, "localsgd", num_workers, "--local-steps", str(local_steps))
    workers = [cluster.script(rank, "delayed.py") for rank in range(num_workers)]
    end_well(*workers, server)
    begun, average = _delayed_averaging(num_workers, STEPS, local_steps)
    for rank, worker in enumerate(workers):
        lines = [line.split() for line in worker.output.splitlines() if line.startswith(("before", "at the end"))]
        assert [float.fromhex(words[-1]) for words in lines[:-1]] == pytest.approx(begun[rank], rel=1e-13)
        assert lines[-1][3] == str(STEPS)
        assert float.fromhex(lines[-1][-1]) == pytest.approx(average, rel=1e-13)
    rounds = -(-STEPS // local_steps)
    rows = cluster.summary()["workers"]
    lines = [(row["contributions"], row["training_steps"], row["samples"]) for row in rows]
    assert lines == [(rounds, STEPS, STEPS)] * num_workers
    assert [row["staleness_max"] for row in rows] == [1] * num_workers
    assert rows[0]["staleness_mean"] == pytest.approx((rounds - 1) / rounds)
