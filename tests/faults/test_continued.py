"""A connection that breaks in the middle of a large payload: what has come does not travel again (needs no root)."""

from __future__ import annotations

import socket

import pytest
import torch

from paramserver.tests.faults.proxy import Plan, Proxy

PADDING = 8_000_000  # floats: 32 MB a payload
PAYLOAD = 4 * PADDING
CAME = 24 << 20  # of the first contribution, behind the initial weights, when its connection is reset
LOST = 12 << 20  # of that, at most: what the kernels of a busy machine still had


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "direct"])
def test_the_rest_of_a_payload_goes_over_the_next_connection(job, transport):
    server = job.serve("async", 1, 2, "--set", "server.lease_s=30")
    proxy = job.proxy(lambda _: Plan(reset_after_up=None if proxy.num_resets else PAYLOAD + CAME))
    with proxy:
        worker = job.work(0, padding=PADDING, PS_SERVER=proxy.address)
        job.end(worker, server)
    (continued,) = worker.events("continued")
    sent = sum(connection.up for connection in proxy.connections)
    assert (continued["seq"], continued["of"] // PAYLOAD) == (1, 1)
    assert continued["num_bytes"] <= PAYLOAD - CAME + LOST
    assert 3 * PAYLOAD <= sent <= 3 * PAYLOAD + LOST
    assert torch.equal(job.applied(), torch.ones(1, 2))
    job.check()


REPLY = {"raw": PAYLOAD, "bf16": PAYLOAD // 2, "int8": PAYLOAD // 4}  # bytes, about


@pytest.mark.parametrize("codec", REPLY)
@pytest.mark.parametrize(
    "transport", [pytest.param("grpc", marks=pytest.mark.campaign), pytest.param("direct", marks=pytest.mark.slow)]
)
def test_a_reply_that_breaks_off_comes_whole_over_the_next_connection(job, transport, codec):
    """The connection is reset in the middle of the first reply, behind the weights to start from."""
    server = job.serve("async", 1, 3, "--set", "server.lease_s=30")
    cut_at = PAYLOAD + REPLY[codec] * 3 // 4
    proxy = job.proxy(lambda _: Plan(reset_after_down=None if proxy.num_resets else cut_at))
    with proxy:
        worker = job.work(0, padding=PADDING, PS_SERVER=proxy.address, PS_WORKER__REPLY_CODEC=codec)
        job.end(worker, server)
    # START and final ones are raw; of differences one reply is the whole reference: so it is without a reset.
    without_reset = 3 * PAYLOAD + 2 * REPLY[codec] if codec == "int8" else 2 * PAYLOAD + 3 * REPLY[codec]
    assert proxy.num_resets == 1
    assert (
        without_reset
        < sum(connection.down for connection in proxy.connections)
        <= without_reset + cut_at - PAYLOAD + (2 << 20)
    )
    assert torch.equal(job.applied(), torch.ones(1, 3))
    job.check()


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        pytest.param("direct", "sync", marks=pytest.mark.slow),
        pytest.param("grpc", "async", marks=pytest.mark.campaign),
        pytest.param("grpc", "sync", marks=pytest.mark.slow),
        pytest.param("direct", "async", marks=pytest.mark.campaign),
    ],
)
def test_of_two_shards_both_send_the_reply_again_where_one_broke_off(job, transport, mode):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as also:
        port, direct_port = taken.getsockname()[1], also.getsockname()[1]
    middle = PAYLOAD // 2
    server = job.serve(mode, 1, 3, "--shards", "2", "--set", "server.lease_s=30")
    way = Proxy(
        f"127.0.0.1:{port}",
        lambda _: Plan(reset_after_down=None if way.num_resets else middle + middle * 3 // 4),
        direct_port if transport == "direct" else 0,
    )
    with way:
        where = ("--listen", f"127.0.0.1:{port}", "--set", f"server.advertise={way.address}")
        where += ("--set", f"server.direct_port={direct_port}", "--set", "server.lease_s=30")
        shard = job.shard(1, 2, *where)
        job.end(job.work(0, padding=PADDING), server, shard)
    assert way.num_resets == 1
    assert torch.equal(job.applied(), torch.ones(1, 3))
    job.check()
