"""Behind a long queue a ping gets its reply later than a worker waits for it at first: it learns to wait longer."""

from __future__ import annotations

import time

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.tests.faults.proxy import Plan, Proxy

STALL_S = 5.0  # longer than a connection waits at first (2 s) and then (4 s), shorter than the third does


@pytest.mark.slow
def test_a_connection_lost_to_an_unanswered_ping_is_followed_by_more_patient_ones(job):
    server = job.serve("async", 1, 400, "--set", "server.lease_s=30")
    proxy = job.proxy(lambda _: Plan())
    worker = job.work(0, pause_s=0.02, PS_SERVER=proxy.address, PS_WORKER__TRANSPORTS="grpc")
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


def test_a_server_waits_longer_for_its_pings_than_a_lease(cluster):
    """What it says takes longer than that to arrive, its pings too: the connection is there, and is kept."""
    cluster.server("--mode", "async", "--set", "server.lease_s=0.5")
    with Proxy(cluster.address, lambda _: Plan(delay_down_s=1.0)) as proxy:
        with grpc.insecure_channel(proxy.address) as channel:
            for _ in range(5):  # each takes one such delay: server pings fall due and go unanswered meanwhile
                status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status
                assert status == health_pb2.HealthCheckResponse.SERVING
        assert len(proxy.connections) == 1
