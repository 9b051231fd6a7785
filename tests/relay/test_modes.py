"""Modes of regions below modes of the run above: every contribution of every worker counts once."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.relay.world import STEPS, World

OUTER = ("--outer-lr", "1", "--outer-momentum", "0")
ABOVE = {
    "localsgd": ("localsgd", "--local-steps", "4"),
    "diloco": ("diloco", "--local-steps", "4", *OUTER),
    "diloco, delayed": ("diloco", "--local-steps", "4", *OUTER, "--delayed-update"),
    "fragments": ("diloco", "--local-steps", "4", *OUTER, "--fragments", "2"),
    "async_diloco": ("async_diloco", "--local-steps", "4", *OUTER),
}
# The mode of a region and its flags, and the weight of one worker's contribution in the region's weights.
BELOW = {
    "sync": ("sync", (), 0.5),
    "async": ("async", (), 1.0),
    "ssp": ("ssp", ("--staleness", "1"), 1.0),
    "dssp": ("dssp", (), 1.0),
    "buffered": ("buffered", (), 0.5),
    "localsgd": ("localsgd", ("--local-steps", "2"), 0.5),
    "diloco": ("diloco", ("--local-steps", "3", *OUTER), 0.5),
    "allreduce": ("allreduce", (), 0.5),
}
PAIRS = [
    ("async", "localsgd"), ("sync", "fragments"), ("async", "diloco, delayed"), ("async", "async_diloco"),
    ("ssp", "diloco"),
    ("dssp", "localsgd"), ("buffered", "diloco"), ("localsgd", "diloco"), ("localsgd", "async_diloco"),
    ("diloco", "localsgd"), ("allreduce", "localsgd"), ("allreduce", "diloco"), ("allreduce", "async_diloco"),
    ("allreduce", "fragments"),
]  # fmt: skip
FAST = {("async", "localsgd")}


def until_version(relay: Process, version: int) -> None:
    relay.until(lambda: any(event["version"] >= version for event in relay.events("status")), f"version {version}")


def started(cluster: Cluster, below: str, above: str, *more: str) -> World:
    world = World(cluster, *ABOVE[above], "--summary", "above.json", *more)
    mode, flags, _ = BELOW[below]
    for rank in range(2):
        world.relay(rank, *flags, "--set", "server.status_interval_s=0.05", mode=mode)
    return world


def check(world: World, below: str, above: str, workers: list[Process]) -> None:
    """Check that each contribution has its weight, and that all samples are in the accounts of the run above."""
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    weights = world.weights()
    if below == "buffered":  # late contributions weigh less
        assert bool((weights > 0.2).all()) and bool((weights < 1 + 1e-9).all()), weights
    elif above == "async_diloco":  # it also steps along the delta of one region alone, which is then not halved
        torch.testing.assert_close(weights, weights.round().clamp(1, 2), rtol=0, atol=1e-9)
    else:
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-9)
    summary = json.loads((world.cluster.folder / "above.json").read_text())
    assert [worker["samples"] for worker in summary["workers"]] == [2 * STEPS, 2 * STEPS]


@pytest.mark.parametrize(
    ("below", "above"), [pair if pair in FAST else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_every_contribution_counts_once(cluster: Cluster, below: str, above: str) -> None:
    world = started(cluster, below, above)
    workers = world.workers(2.0 / BELOW[below][2])
    check(world, below, above, workers)
    for worker in workers if below == "allreduce" else ():  # has steps of the other region before the final weights
        (line,) = (line for line in worker.output.split("\n") if line.startswith("has "))
        assert int(line.split()[1]) > 2 * STEPS, line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("below", "above", "version"),
    [
        ("async", "localsgd", 10), ("ssp", "diloco, delayed", 10), ("allreduce", "localsgd", 5),
        ("allreduce", "diloco", 10), ("allreduce", "localsgd", 15),
    ],
)  # fmt: skip
def test_a_killed_relay_goes_on_exactly_once(cluster: Cluster, below: str, above: str, version: int) -> None:
    world = started(cluster, below, above)
    mode, flags, weight = BELOW[below]
    workers = world.workers(2.0 / weight, delay_s=0.1)
    relay = world.relays[1]
    until_version(relay, version)
    relay.signal(signal.SIGKILL)
    world.relay(1, *flags, mode=mode)
    check(world, below, above, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "version"), [(0, 4), (1, 9), (0, 14)])
def test_a_killed_worker_of_a_region_in_allreduce(cluster: Cluster, rank: int, version: int) -> None:
    """Its new process gets weights of a peer or of the relay; the lowest rank uploads weights for the exchanges."""
    world = started(cluster, "allreduce", "localsgd")
    workers = world.workers(4.0, delay_s=0.1)
    until_version(world.relays[1], version)
    workers[2 + rank].kill()
    workers[2 + rank] = world.worker(1, rank, 4.0, delay_s=0.1)
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    weights = world.weights()
    # A step that the other worker took alone has twice the weight; the killed worker has none in it.
    sums = weights.view(2, 2, STEPS).sum(dim=1)
    torch.testing.assert_close(sums, torch.full_like(sums, 2.0), rtol=0, atol=1e-9)
    torch.testing.assert_close(weights, weights.round().clamp(0, 2), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("above", ["localsgd", "diloco"])
def test_a_server_above_that_goes_back_takes_a_region_in_allreduce_with_it(cluster: Cluster, above: str) -> None:
    world = started(cluster, "allreduce", above, "--checkpoint-dir", "snapshots", "--checkpoint-every", "4")
    workers = world.workers(4.0, delay_s=0.1)
    server = world.above
    server.until(lambda: any(event["version"] for event in server.events("snapshot")), "a later snapshot")
    server.kill()
    world.restart_above()
    check(world, "allreduce", above, workers)
