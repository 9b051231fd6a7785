"""The run above: evaluations on the way, a link that is cut for long, and servers that cannot be above."""

from __future__ import annotations

import json
import time

import psutil
import pytest

from paramserver.tests.cluster import Cluster
from paramserver.tests.faults.proxy import Proxy
from paramserver.tests.ports import free_port
from paramserver.tests.relay.world import ABOVE, WAITING, World, assert_weights, until_version

CUT_S = 12.0  # longer than the lease of 5 s
LONG_CUT_S = 60.0  # longer than worker.give_up_s and limits.progress_s too
AHEAD = 8
GRPC = ("--set", "worker.transports=grpc")
MORE_AHEAD = ("--set", f"upstream.ahead={AHEAD}")


@pytest.mark.slow
@pytest.mark.parametrize(("above", "relay_flags"), [("sync", ()), ("diloco", WAITING)])
def test_one_worker_of_all_regions_evaluates_on_the_way(
    cluster: Cluster, above: str, relay_flags: tuple[str, ...]
) -> None:
    flags = ("--workers", "2", "--steps", "24", "--eval-every", "8", "--summary", "above.json")
    cluster.server("--mode", *ABOVE[above], *flags)
    address, processes = cluster.address, []
    for rank in range(2):
        relay = cluster.server(
            "--mode", "sync", "--workers", "2", "--upstream", address, "--upstream-rank", str(rank),
            "--summary", f"relay{rank}.json", *relay_flags,
        )  # fmt: skip
        processes += [relay, *(cluster.worker(worker, "--task", "linear") for worker in range(2))]
    assert [process.wait() for process in (*processes, cluster.processes[0])] == [0] * 7
    curve, first, second = (
        json.loads((cluster.folder / f"{name}.json").read_text())["curve"] for name in ("above", "relay0", "relay1")
    )
    assert [point["step"] for point in curve] == [8, 16, 24], curve
    assert not second
    on_the_way = [point["metrics"] for point in curve[:-1]]
    assert on_the_way == [point["metrics"] for point in first if point["step"] < 24]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "version"),
    [(MORE_AHEAD, 5), (WAITING, 5), (("--upstream-every", "4"), 2)],
    ids=("ahead", "waits", "before its first contribution"),
)
def test_a_border_that_is_cut_for_long(cluster: Cluster, every: tuple[str, ...], version: int) -> None:
    """The region goes on for so many steps, then its workers wait with a sentence; later every step counts once."""
    world = World(cluster, "localsgd")
    world.relay(0, *every)
    with Proxy(world.address) as proxy:
        relay = world.relay_behind(proxy, 1, *every, *GRPC)
        workers = world.workers(delay_s=0.05)
        until_version(relay, version)
        proxy.stall()
        end = time.monotonic() + CUT_S
        worker = workers[2]
        worker.until(lambda: any(f"the server above, at {proxy.address}, has not replied" in line["reason"]
                                 for line in worker.events("waiting")), "a sentence")  # fmt: skip
        worker.until(lambda: time.monotonic() > end, "the end of the cut")
        versions = [event["version"] for event in relay.events("status")]
        # Beyond the contribution without a reply.
        assert versions[-1] - 4 <= (AHEAD if version > 4 else 16) + 4, versions
        proxy.go_on()
        assert_weights(world.wait(workers))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("above", "below", "relay_flags"),
    [("sync", "sync", ()), ("localsgd", "async", MORE_AHEAD), ("localsgd", "allreduce", MORE_AHEAD)],
)
def test_a_border_that_is_cut_for_a_minute(
    cluster: Cluster, above: str, below: str, relay_flags: tuple[str, ...]
) -> None:
    """Nothing times out: the relay keeps trying, without a thread or descriptor more, and no worker leaves."""
    world = World(cluster, above, below=below)
    world.relay(0, *relay_flags)
    with Proxy(world.address) as proxy:
        relay = world.relay_behind(proxy, 1, *relay_flags, *GRPC)
        workers = world.workers(delay_s=0.05)
        until_version(relay, 5)
        proxy.stall()
        start = time.monotonic()
        worker, process = workers[2], psutil.Process(relay.popen.pid)
        worker.until(lambda: time.monotonic() > start + LONG_CUT_S / 3, "a part of the cut")
        ahead, used = relay.events("status")[-1]["version"], (process.num_fds(), process.num_threads())
        worker.until(lambda: time.monotonic() > start + LONG_CUT_S, "the end of the cut")
        assert any("has not replied for 3" in line["reason"] for line in worker.events("waiting"))
        assert relay.events("status")[-1]["version"] == ahead
        assert max(process.num_fds() - used[0], process.num_threads() - used[1]) <= 4, used
        proxy.go_on()
        assert_weights(world.wait(workers))


@pytest.mark.slow
@pytest.mark.parametrize("above", ["sync", "localsgd"])
def test_a_worker_of_one_region_stops_all(cluster: Cluster, above: str) -> None:
    world = World(cluster, above)
    world.wait(world.start(delay_s=0.05, stop_at=6))
    assert "enough" in json.loads((cluster.folder / "above.json").read_text())["ended_by"]


def test_relays_that_are_above_each_other(cluster: Cluster) -> None:
    """Neither listens before it has joined the other."""
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    relays = []
    for listen, above in ((first, second), (second, first)):
        flags = ("--listen", listen, "--upstream", above, "--set", "worker.give_up_s=1")
        relays.append(cluster.fork(f"relay{len(relays)}", "-m", "paramserver.ps", *flags))
    assert [relay.wait() for relay in relays] == [15, 15]
    assert f"no server at {second}" in relays[0].output
    assert "a relay listens once it has joined the server above" in relays[0].output


@pytest.mark.slow
def test_two_relays_of_one_rank(cluster: Cluster) -> None:
    """The newer one has the rank; the other ends with a sentence."""
    world = World(cluster, "sync", num_regions=1)
    world.relay(0)
    workers = world.workers(delay_s=0.1)
    older = world.relays[0]
    until_version(older, 2)
    newer = cluster.server("--mode", "sync", "--workers", "2", "--upstream", world.address, "--upstream-rank", "0")
    assert older.wait() == 13, older.output
    assert "another process joined as rank 0" in older.output
    for worker in workers:
        worker.wait()
    newer.kill()
