"""A server of several processes that stand still or lose each other, while it trains."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Process
from paramserver.tests.faults.proxy import Proxy

pytestmark = pytest.mark.slow

PADDING = 60_000  # floats, divided over the shards: each counts the commits
LEASE_S = 3.0
PAUSE_S = 5.0
LEASE = ("--set", f"server.lease_s={LEASE_S}")


class Rig(NamedTuple):
    """Two shards and two workers. `link` is between the shards, `way` between the workers and shard 1."""

    server: Process
    shard: Process
    workers: list[Process]
    link: Proxy
    way: Proxy


@contextlib.contextmanager
def rigged(job, mode: str, steps: int, *flags: str, pause_s: float = 0.03) -> Iterator[Rig]:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as also:
        port, direct_port = taken.getsockname()[1], also.getsockname()[1]
    server = job.serve(mode, 2, steps, "--shards", "2", *LEASE, *flags)
    with Proxy(job.address) as link, Proxy(f"127.0.0.1:{port}", direct_port=direct_port) as way:
        where = ("--listen", f"127.0.0.1:{port}", "--set", f"server.advertise={way.address}")
        where += ("--set", f"server.direct_port={direct_port}")
        address, job.address = job.address, link.address
        shard = job.shard(1, 2, *where, *LEASE, *flags)
        job.address = address
        workers = [job.work(rank, pause_s, PADDING) for rank in range(2)]
        job.until(lambda: all(job.history.last_step(rank) >= 5 for rank in range(2)), "first steps")
        yield Rig(server, shard, workers, link, way)


def ends_whole(job, rig: Rig, mode: str, steps: int) -> None:
    """Everyone ends well, each contribution was applied once on both shards, and nobody went back."""
    job.end(*rig.workers, rig.server, rig.shard)
    job.check()
    assert torch.equal(job.applied(), torch.full((2, steps), 0.5 if mode == "sync" else 1.0))
    counts = load_file(job.folder / "w.safetensors")["padding"]
    assert torch.equal(counts, torch.full((PADDING,), -float(steps if mode == "sync" else 2 * steps)))
    for process in (rig.server, rig.shard):
        assert process.events("shard_lost") == process.events("coordinator_lost") == []
        assert "Traceback" not in process.output
    assert len(job.history.lines("start")) == 1


def commits(job, number: int) -> None:
    """So many more have come."""
    before = len(job.history.lines("commit"))
    job.until(lambda: len(job.history.lines("commit")) >= before + number, "commits")


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_connections_between_shards_and_to_one_shard_are_reset(job, mode):
    steps = 150
    with rigged(job, mode, steps) as rig:
        for number in range(1, 4):
            rig.link.reset_all()
            job.until(lambda number=number: len(rig.server.events("shard_back")) == number, "return of the shard")
            commits(job, 3)
        rig.way.reset_all()
        job.until(lambda: len(rig.server.events("resumed")) >= 2, "return of the workers")
        ends_whole(job, rig, mode, steps)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cut_between_shards_shorter_than_a_lease_costs_nothing(job, mode):
    steps = 150
    with rigged(job, mode, steps) as rig:
        rig.link.stall()
        rig.link.reset_all()
        time.sleep(0.5 * LEASE_S)
        rig.link.go_on()
        job.until(lambda: bool(rig.server.events("shard_back")), "return of the shard")
        ends_whole(job, rig, mode, steps)


@pytest.mark.parametrize("which", ["the coordinator", "the other"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_shard_that_stood_still_goes_on(job, mode, which):
    steps = 150
    with rigged(job, mode, steps) as rig:
        frozen = rig.server if which == "the coordinator" else rig.shard
        frozen.signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        frozen.signal(signal.SIGCONT)
        commits(job, 3)
        ends_whole(job, rig, mode, steps)
