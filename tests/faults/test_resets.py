"""Connections are reset in the middle of uploads and of replies, and replies are lost (proxy.py; needs no root)."""

from __future__ import annotations

import random
import time

import pytest
import torch

from paramserver.tests.faults.proxy import Plan

PADDING = 30_000  # floats: an exchange is about 120 kB each way


def begin(job, proxy_plan, mode: str, num_workers: int, steps: int, *flags: str):
    """A run whose workers reach the server through a proxy. The lease is long: on a machine that is busy enough for a
    heartbeat to come too late, a round would close without its worker, and that is another test's."""
    lease = ("--set", "server.lease_s=30")
    server = job.serve(mode, num_workers, steps, "--set", "policy.staleness=2", *lease, *flags)
    proxy = job.proxy(proxy_plan)
    workers = [job.work(rank, padding=PADDING, PS_SERVER=proxy.address) for rank in range(num_workers)]
    return server, workers, proxy


def resets(seed: int, exchanges: float):
    """A plan: each connection is reset after a random number of bytes, on average after so many exchanges."""
    chance = random.Random(seed)
    mean = exchanges * 4 * PADDING

    def plan(_: int) -> Plan:
        after = 2_000 + int(chance.uniform(0, 2 * mean))
        return Plan(reset_after_up=after) if chance.random() < 0.5 else Plan(reset_after_down=after)

    return plan


@pytest.mark.slow
def test_resets_in_uploads_and_replies(job):
    """Every other exchange or so; the first connection ends in the middle of the initial weights."""
    seed = 4
    random_plan = resets(seed, exchanges=2.0)
    server, workers, proxy = begin(
        job, lambda number: Plan(reset_after_up=50_000) if number == 0 else random_plan(number), "async", 1, 40
    )
    with proxy:
        job.end(*workers, server)
    assert min(proxy.num_resets_up, proxy.num_resets_down) >= 3, f"seed {seed}"
    assert torch.equal(job.applied(), torch.ones(1, 40)), f"seed {seed}"
    assert job.history.outcomes()["accepted"] == 40
    job.check()


@pytest.mark.parametrize(("mode", "seed"), [("async", 1), ("ssp", 2), ("sync", 3)])
@pytest.mark.campaign
def test_a_thousand_contributions_through_resets(job, metric, mode, seed):
    steps = 250
    server, workers, proxy = begin(job, resets(seed, exchanges=3.0), mode, 4, steps)
    with proxy:
        job.end(*workers, server)
    metric("resets", proxy.num_resets)
    assert proxy.num_resets >= 200, f"seed {seed}"
    job.check()
    share = 0.25 if mode == "sync" else 1.0
    # Means of four are rounded on their way; twice would be twice as much.
    is_once = torch.isclose(job.applied(), torch.tensor(share))
    metric("applied once, of 1,000", int(is_once.sum()))
    # A worker that is cut off in the middle of its START begins anew. In sync a round that is full without it closes:
    # there three count for a third, and it goes on with the others at the next step.
    num_short = sum(len(line["contributions"]) != 4 for line in job.history.lines("commit"))
    has_lost = any(line["how"] == "replaced" for line in job.history.lines("leave"))
    not_once = 4 * num_short if mode == "sync" and has_lost else 0
    assert int((~is_once).sum()) <= not_once, f"seed {seed}"


@pytest.mark.campaign
def test_a_stall_is_waited_out(job):
    """Nothing passes for a while, and no connection ends: shorter than the keepalive, nobody notices."""
    server, workers, proxy = begin(job, lambda _: Plan(), "async", 1, 200)
    with proxy:
        job.until(lambda: job.history.last_step(0) >= 20, "first steps")
        proxy.stall()
        time.sleep(1.5)
        proxy.go_on()
        job.end(*workers, server)
    assert workers[0].events("connection_lost") == []
    assert torch.equal(job.applied(), torch.ones(1, 200))
    job.check()
