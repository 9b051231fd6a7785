"""A worker is killed between steps or in the middle of its upload, or frozen beyond its lease: what the others lose."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from paramserver.tests.faults.proxy import Plan

PAUSE_S = 0.03
LEASE_S = 2.0


def begin(job, mode: str, steps: int):
    """A run of two workers on its way."""
    server = job.serve(mode, 2, steps, "--set", f"server.lease_s={LEASE_S}", "--set", "policy.staleness=2")
    workers = [job.work(rank, PAUSE_S) for rank in range(2)]
    job.until(lambda: all(job.history.last_step(rank) >= 5 for rank in range(2)), "first steps")
    return server, workers


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
@pytest.mark.campaign
def test_a_killed_worker_holds_nobody_up(job, metric, mode):
    server, (survivor, victim) = begin(job, mode, 150)
    victim.signal(signal.SIGKILL)
    killed = time.monotonic()
    victim.popen.wait()
    job.until(lambda: any(t > killed + 1.0 for t in job.history.commits_of({0})), "commits of the other")
    metric("others' stall, s", (stall := job.history.stall({0}, killed, killed + 0.5)))
    (left,) = job.history.lines("leave", rank=1)
    assert left["how"] == "closed"
    assert stall <= 1.0  # 0.5 s and what other programs take
    second = job.work(1, PAUSE_S)
    job.end(survivor, second, server)
    job.check()
    if mode != "sync":
        assert torch.equal(job.applied(), torch.ones(2, 150))


@pytest.mark.parametrize("mode", ["sync", "ssp", "async", "allreduce"])
@pytest.mark.campaign
def test_a_frozen_worker_holds_the_others_up_for_one_lease(job, metric, mode):
    """Frozen beyond its lease, in whatever it does; what it sends when it goes on is stale."""
    server, (other, frozen) = begin(job, mode, 300)
    frozen.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    job.until(lambda: job.history.ends_of(1), "departure of the frozen worker")
    (left,) = job.history.lines("leave", rank=1)
    job.until(lambda: any(t > left["t"] + 1.0 for t in job.history.commits_of({0})), "commits of the other")
    frozen.signal(signal.SIGCONT)
    continued = time.monotonic()
    job.until(
        lambda: job.history.last_step(1) and job.history.commits_of({1})[-1] > continued,
        "step of the worker that was frozen",
    )
    stall = job.history.stall({0}, stopped, left["t"])
    metric("others' stall beyond the lease, s", stall - LEASE_S)
    job.end(other, frozen, server)
    assert left["how"] == "lease"
    assert stall <= LEASE_S + 1.0
    stale = [
        line
        for line in job.history.lines("accept", rank=1, incarnation=left["incarnation"])
        if line["t"] > left["t"] and line["outcome"] == "accepted"
    ]
    assert stale == []
    job.check()
    if mode in ("ssp", "async"):
        assert torch.equal(job.applied(), torch.ones(2, 300))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.campaign
def test_half_an_upload_is_dropped_and_its_memory_is_back(job, mode):
    """What the victim sends ends in the middle of its sixth contribution; then it is killed. There is memory for
    one upload only: the other worker goes on because it was given back."""
    padding = 1_000_000  # floats
    steps = 30
    flags = ("--set", "server.max_staged=1", "--set", f"server.lease_s={LEASE_S}", "--set", "server.absent_s=0")
    server = job.serve(mode, 2, steps, *flags)
    num_bytes = int(5.5 * 4 * padding)
    with job.proxy(lambda _: Plan(lose_after_up=num_bytes)) as proxy:
        other = job.work(0, padding=padding)
        server.event("admitted")  # it has brought the initial weights
        victim = job.work(1, padding=padding, PS_SERVER=proxy.address)
        job.until(lambda: any(c.up >= num_bytes for c in proxy.connections), "half an upload")
        job.until(lambda: _state(server, 1) == "uploading", "half an upload in the server's view")
        num_counted = job.history.last_step(1)
        victim.signal(signal.SIGKILL)
        killed = time.monotonic()
        victim.popen.wait()
        job.until(lambda: job.history.ends_of(1), "departure of the killed worker")
        job.until(lambda: job.history.commits_of({0})[-1] > killed, "commit of the other")
        job.end(other)
        assert num_counted == job.history.last_step(1) == 5
        server.signal(signal.SIGTERM)
        server.wait()
    job.check()
    assert torch.equal(job.applied()[1, 5:], torch.zeros(steps - 5))


def _state(server, rank: int) -> str:
    """What the server's last status says of a worker."""
    statuses = server.events("status")
    return next((row["state"] for row in statuses[-1]["workers"] if row["rank"] == rank), "") if statuses else ""
