"""A link on which everything takes its time, both ways: nothing is lost, and nobody is let go."""

from __future__ import annotations

import pytest
import torch

from paramserver.tests.faults.proxy import Plan

DELAY_S = 0.05  # each way
STEPS, PADDING = 6, 1_000_000  # 4 MB each way, more than a window's first 64 KiB


@pytest.mark.parametrize("transport", ["grpc", "direct"])
def test_payloads_of_megabytes_and_heartbeats_pass_a_link_of_100_ms(job, transport):
    job.transport = transport
    server = job.serve("async", 1, STEPS)
    with job.proxy(lambda _: Plan(delay_up_s=DELAY_S, delay_down_s=DELAY_S)) as proxy:
        wanted = {"direct": "direct,grpc"}.get(transport, transport)
        worker = job.work(0, 0.0, PADDING, PS_SERVER=proxy.address, PS_WORKER__TRANSPORTS=wanted)
        assert [worker.wait(), server.wait()] == [0, 0], worker.output
        passed = sum(connection.up for connection in proxy.connections)
        assert passed > STEPS * 4 * PADDING and proxy.num_resets == 0
    assert [event["transport"] for event in worker.events("tensors")] == [transport]
    assert not worker.events("connection_lost") and job.history.ends_of(0) == ["goodbye"]
    job.check()
    assert torch.equal(job.applied(), torch.ones(1, STEPS))
