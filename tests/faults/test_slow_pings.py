"""Behind a long queue a ping is answered later than a worker waits for it at first: it learns to wait longer."""

from __future__ import annotations

import time

import pytest
import torch

from paramserver.tests.faults.proxy import Plan

STALL_S = 5.0  # longer than a connection waits at first (2 s) and then (4 s), shorter than the third does


@pytest.mark.slow
def test_a_connection_lost_to_an_unanswered_ping_is_followed_by_more_patient_ones(job):
    server = job.serve("async", 1, 400, "--set", "server.lease_s=30")
    proxy = job.proxy(lambda _: Plan())
    worker = job.work(0, pause_s=0.02, PS_SERVER=proxy.address, PS_WORKER__LANES="grpc")
    with proxy:
        for stalls in range(1, 4):
            wanted = job.history.last_step(0) + 5
            job.until(lambda wanted=wanted: job.history.last_step(0) >= wanted, f"steps before stall {stalls}")
            proxy.stall()
            time.sleep(STALL_S)
            proxy.go_on()
        assert (worker.wait(), server.wait()) == (0, 0)
    assert len(worker.events("connection_lost")) <= 2
    assert torch.equal(job.applied(), torch.ones(1, 400))
    job.check()
