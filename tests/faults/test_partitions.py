"""The network between the server and one worker is cut: shorter than the lease, longer than it, one way only."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
import torch

from .network import address_of

PAUSE_S = 0.03
MODES = ["sync", "async", "ssp", "allreduce"]
CAMPAIGN = [pytest.param(mode, marks=pytest.mark.campaign) for mode in MODES]
EACH = [pytest.param("sync", marks=pytest.mark.slow), *CAMPAIGN]
TOGETHER = ["sync", "allreduce"]  # a version holds what all have brought


def begin(rig, mode: str, steps: int, lease_s: float, **options: int):
    """A run of two workers on its way."""
    ahead = ("--staleness", "2") if mode == "ssp" else ()
    server = rig.serve(mode, 2, steps, "--set", f"server.lease_s={lease_s}", *ahead)
    workers = [rig.work(rank, PAUSE_S, **options) for rank in range(2)]
    rig.until(lambda: all(rig.history.last_step(rank) >= 5 for rank in range(2)), "first steps")
    return server, workers


def cut(rig, seconds: float) -> float:
    """Cut worker 1 off for so long; when it began."""
    began = time.monotonic()
    rig.net.partition(1)  # from the other worker too
    time.sleep(seconds)
    rig.net.heal(1)
    return began


def back(rig) -> None:
    """The worker that was cut off is in a commit again."""
    step = rig.history.last_step(1)
    rig.until(lambda: rig.history.last_step(1) > step, "step of the worker that was cut off")


def check_whole(rig, mode: str) -> None:
    """Both workers' contributions are all applied, once; where a version is all workers', always together."""
    rig.check()
    assert torch.equal(rig.applied(), torch.full((2, rig.steps), 0.5 if mode in TOGETHER else 1.0))


@pytest.mark.parametrize("mode", EACH)
@pytest.mark.parametrize(("lease_s", "cut_s"), [(2.0, 1.0), pytest.param(8.0, 4.5, marks=pytest.mark.campaign)])
def test_a_cut_shorter_than_the_lease_is_bridged(rig, mode, lease_s, cut_s):
    """After 4.5 s the worker has given its connection up and comes back with another one."""
    server, workers = begin(rig, mode, 120, lease_s)
    cut(rig, cut_s)
    back(rig)
    rig.end(*workers, server)
    assert rig.history.ends_of(1) == rig.history.ends_of(0) == ["goodbye"]
    assert cut_s < 4 or rig.history.resumes(1) >= 1
    check_whole(rig, mode)


@pytest.mark.parametrize("mode", EACH)
def test_a_cut_longer_than_the_lease_costs_the_others_one_lease(rig, metric, mode):
    lease_s, cut_s = 2.0, 5.0
    server, workers = begin(rig, mode, 250, lease_s)
    began = cut(rig, cut_s)
    metric("others' stall beyond the lease, s", (stall := rig.history.stall({0}, began, began + cut_s)) - lease_s)
    back(rig)
    rig.end(*workers, server)
    assert stall <= lease_s + 1.0  # 0.4 s and what other programs take
    assert rig.history.ends_of(1) == ["lease", "goodbye"]
    assert [event["rank"] for event in workers[1].events("rejoined")] == [1]
    rig.check()
    if mode not in TOGETHER:
        assert torch.equal(rig.applied(), torch.ones(2, 250))


# One that averages with others waits for them, who cannot reply either: it is as with a cut in both directions.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "allreduce"])
@pytest.mark.campaign
def test_replies_that_do_not_arrive_are_asked_for_again(rig, mode):
    """One way only: what the worker sends arrives, and counts, and nobody tells it so."""
    server, workers = begin(rig, mode, 120, 8.0)
    rig.net.drop_replies(1)
    workers[1].event("connection_lost")
    rig.net.heal(1)
    back(rig)
    rig.end(*workers, server)
    assert rig.history.ends_of(1) == ["goodbye"]
    assert rig.history.resumes(1) >= 1 <= rig.history.outcomes()["repeated"]
    check_whole(rig, mode)


@pytest.mark.slow
def test_a_direct_connection_that_alone_is_cut(rig) -> None:
    """Its stream and its heartbeat go on. Both ends notice, and the worker goes on over gRPC, exactly once."""
    if rig.transport != "direct":
        pytest.skip("there is none")
    server = rig.serve("async", 2, 200, "--set", "server.direct_port=47123")
    workers = [rig.work(rank, PAUSE_S) for rank in range(2)]
    rig.until(lambda: all(rig.history.last_step(rank) >= 5 for rank in range(2)), "first steps")
    rig.net.partition_port(1, 47123)
    rig.end(*workers, server)
    assert [event["transport"] for event in workers[1].events("tensors")] == ["direct", "grpc"]
    assert "port 47123 (server.direct_port): no reply" in workers[1].events("tensors")[1]["reason"]
    check_whole(rig, "async")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rig", "pairs", "goes"),
    [
        (2, [(0, 1)], 1),
        pytest.param(3, [(1, 2)], 2, marks=pytest.mark.campaign),
        pytest.param(3, [(0, 1), (1, 2)], 1, marks=pytest.mark.campaign),
        pytest.param(3, [(0, 1), (0, 2)], 0, marks=pytest.mark.campaign),
    ],
    indirect=["rig"],
)
def test_who_reaches_the_server_and_not_others_goes_and_these_go_on(rig, metric, pairs, goes) -> None:
    """Who averages needs all others. One is to go, and the run is to end with those that are left."""
    num = rig.net.num_workers
    server = rig.serve("allreduce", num, 120, "--set", "server.lease_s=2", PS_SERVER__ABSENT_S="0")
    workers = [rig.work(rank, PAUSE_S, padding=1 << 16) for rank in range(num)]  # not by way of the lowest
    rig.until(lambda: all(rig.history.last_step(rank) >= 5 for rank in range(num)), "first steps")
    began = time.monotonic()
    for pair in pairs:
        rig.net.partition_pair(*pair)
    left = [worker for rank, worker in enumerate(workers) if rank != goes]
    assert workers[goes].wait() == 15, workers[goes].output
    metric("until it has gone, s", time.monotonic() - began)
    assert re.search("to average with|averages with could not", workers[goes].output)
    assert "Traceback" not in workers[goes].output
    assert [worker.wait() for worker in (*left, server)] == [0] * num, "".join(worker.output for worker in left)
    rig.check()


@pytest.mark.slow
@pytest.mark.parametrize("rig", [1], indirect=True)
def test_who_averages_in_the_clear_where_others_can_reach_it_is_asked_first(rig) -> None:
    """As a server is that listens so; and it listens on no other address."""
    server = rig.serve("allreduce", 1, 1_000_000)
    refused = rig.work(0, PS_SERVER__INSECURE="false")
    assert refused.wait() == 11, refused.output
    assert f"would exchange tensors on {address_of(0)}, which other machines can reach, unencrypted" in refused.output
    assert "fix: on a network you trust" in refused.output and "add --insecure; or use --mode sync" in refused.output
    worker = rig.work(0, PAUSE_S)
    worker.event("group")
    found = subprocess.run([*rig.net.at(0), "ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    assert {line.split()[3].rpartition(":")[0] for line in found.splitlines()} == {address_of(0)}
    server.signal(9)
