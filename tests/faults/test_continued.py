"""A connection that breaks in the middle of a large body: what has come does not travel again (needs no root)."""

from __future__ import annotations

import pytest
import torch

from paramserver.tests.faults.proxy import Plan

PADDING = 8_000_000  # floats: 32 MB a body
BODY = 4 * PADDING
CAME = 24 << 20  # of the first contribution, behind the initial weights, when its connection is reset
LOST = 20 << 20  # of that, at most: a piece that is not whole, and what the kernels of a busy machine still had


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["grpc", "direct"])
def test_the_rest_of_a_body_goes_over_the_next_connection(job, figure, lane):
    server = job.serve("async", 1, 2, "--set", "server.lease_s=30")
    proxy = job.proxy(lambda _: Plan(reset_after_up=None if proxy.num_resets else BODY + CAME))
    with proxy:
        worker = job.work(0, padding=PADDING, PS_SERVER=proxy.address)
        job.end(worker, server)
    (continued,) = worker.events("continued")
    sent = sum(one.up for one in proxy.connections)
    figure("MB sent again", (sent - 3 * BODY) / 1e6)
    assert (continued["step"], continued["of"] // BODY) == (1, 1)
    assert continued["num_bytes"] <= BODY - CAME + LOST
    assert 3 * BODY <= sent <= 3 * BODY + LOST
    assert torch.equal(job.applied(), torch.ones(1, 2))
    job.check()
