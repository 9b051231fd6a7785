"""Regions: relays, their workers and the server above in processes of their own; every contribution counts once."""

from __future__ import annotations

import json
import random
import signal
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.relay.world import STEPS, WAITING, World, assert_weights, until_version

PAIRS = [
    ("sync", "sync"), ("sync", "localsgd of 1 step"), ("sync", "localsgd"), ("sync", "diloco"),
    ("sync", "async_diloco"), ("sync", "fragments"), ("async", "localsgd"), ("async", "diloco, delayed"),
    ("async", "async_diloco"), ("ssp", "diloco"), ("dssp", "localsgd"), ("buffered", "diloco"), ("localsgd", "diloco"),
    ("localsgd", "async_diloco"), ("diloco", "localsgd"), ("allreduce", "localsgd"), ("allreduce", "diloco"),
    ("allreduce", "async_diloco"), ("allreduce", "fragments"),
]  # fmt: skip
FAST = {("sync", "sync"), ("sync", "localsgd"), ("async", "localsgd")}


def some(cases: list[tuple[Any, ...]], fast: set[tuple[Any, ...]]) -> list[Any]:
    """The cases, of which those that are not `fast` are slow."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def check(world: World, above: str, workers: list[Process]) -> None:
    """Check that each contribution has its weight, and that all samples are in the accounts of the run above."""
    weights = world.wait(workers)
    if world.below == "buffered":  # late contributions weigh less
        assert bool((weights > 0.2).all()) and bool((weights < 1 + 1e-9).all()), weights
    else:  # async_diloco also steps along the delta of one region alone, which is then not halved
        assert_weights(weights, most=2.0 if above == "async_diloco" else 1.0)
    summary = json.loads((world.cluster.folder / "above.json").read_text())
    assert [worker["samples"] for worker in summary["workers"]] == [2 * STEPS, 2 * STEPS]


@pytest.mark.parametrize(("below", "above"), some(PAIRS, FAST))
def test_every_contribution_counts_once(cluster: Cluster, below: str, above: str) -> None:
    world = World(cluster, above, below=below)
    workers = world.start(*(WAITING if above == "localsgd of 1 step" else ()))
    check(world, above, workers)
    for worker in workers if below == "allreduce" else ():  # has steps of the other region before the final weights
        (line,) = (line for line in worker.output.split("\n") if line.startswith("has "))
        assert int(line.split()[1]) > 2 * STEPS, line
    if below == "sync":
        shares = [line for worker in workers for line in worker.output.split("\n") if line.startswith("workers")]
        assert sorted(shares) == [f"workers 4 index {index}" for index in range(4)]


KILLED = [
    ("sync", "sync", 6), ("sync", "localsgd", 6), ("async", "localsgd", 10), ("ssp", "diloco, delayed", 10),
    ("allreduce", "localsgd", 5), ("allreduce", "diloco", 10), ("allreduce", "localsgd", 15),
]  # fmt: skip


@pytest.mark.parametrize(("below", "above", "version"), some(KILLED, {("sync", "localsgd", 6)}))
def test_a_killed_relay_goes_on_exactly_once(cluster: Cluster, below: str, above: str, version: int) -> None:
    world = World(cluster, above, below=below)
    workers = world.start(delay_s=0.1)
    until_version(world.relays[1], version)
    world.relays[1].kill()
    world.relay(1)
    check(world, above, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "version"), [(0, 4), (1, 9), (0, 14)])
def test_a_killed_worker_of_a_region_in_allreduce(cluster: Cluster, rank: int, version: int) -> None:
    """Its new process gets weights of a peer or of the relay; the lowest rank uploads weights for the exchanges."""
    world = World(cluster, "localsgd", below="allreduce")
    workers = world.start(delay_s=0.1)
    until_version(world.relays[1], version)
    workers[2 + rank].kill()
    workers[2 + rank] = world.worker(1, rank, delay_s=0.1)
    weights = world.wait(workers)
    # A step that the other worker took alone has twice the weight; the killed worker has none in it.
    assert_weights(weights.view(2, 2, STEPS).sum(dim=1), 2.0, 2.0)
    assert_weights(weights, 0.0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("below", "above"), [("sync", "sync"), ("sync", "localsgd"), ("allreduce", "localsgd"), ("allreduce", "diloco")]
)
def test_a_server_above_that_goes_back_takes_its_regions_with_it(cluster: Cluster, below: str, above: str) -> None:
    world = World(cluster, above, "--checkpoint-dir", "snapshots", "--checkpoint-every", "4", below=below)
    workers = world.start(delay_s=0.1)
    server = world.above
    server.until(lambda: any(event["version"] for event in server.events("snapshot")), "a later snapshot")
    server.kill()
    world.restart_above()
    check(world, above, workers)


def test_one_region_that_waits_has_the_bits_of_a_flat_run(cluster: Cluster) -> None:
    flags = ("--workers", "2", "--steps", "20")
    cluster.server("--mode", "sync", *flags, "--save", "flat.safetensors")
    assert [worker.wait() for worker in [cluster.worker(rank) for rank in range(2)]] == [0, 0]
    cluster.server("--mode", "sync", "--workers", "1", "--steps", "20", "--save", "above.safetensors")
    relay = cluster.server("--mode", "sync", "--workers", "2", "--upstream", cluster.address)
    assert [worker.wait() for worker in [cluster.worker(rank) for rank in range(2)]] == [0, 0]
    assert relay.wait() == 0
    flat, above = (load_file(cluster.folder / f"{name}.safetensors") for name in ("flat", "above"))
    assert all(torch.equal(flat[name], above[name]) for name in flat)


@pytest.mark.parametrize("is_waiting", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_relay_that_is_asked_to_end_ends(cluster: Cluster, is_waiting: bool) -> None:
    """While its workers train, and while all of them wait for the other region."""
    world = World(cluster, "sync")
    relay = world.relay(0)
    if not is_waiting:
        world.relay(1)
    workers = world.workers(delay_s=0.05)
    if is_waiting:
        workers[0].until(
            lambda: any("the server above" in line["reason"] for line in workers[0].events("waiting")), "wait"
        )
    else:
        until_version(relay, 2)
    relay.signal(signal.SIGTERM)
    assert relay.wait() == 143


KILLS = 5
LAST_KILL = STEPS - 8  # a relay that dies when the run above is over finds no server above


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(40))
def test_kills_of_a_relay_at_seeded_points(cluster: Cluster, seed: int) -> None:
    """200 kills in all, of both relays, while the run above waits for each exchange or not."""
    chance = random.Random(seed)
    above = chance.choice(["sync", "localsgd", "diloco"])
    world = World(cluster, above)
    workers = world.start(delay_s=0.1)
    for _ in range(KILLS):
        rank, more = chance.randrange(2), chance.randrange(1, 3)
        relay = world.relays[rank]
        until_version(relay, min(relay.event("status")["version"] + more, LAST_KILL))
        relay.kill()
        world.relay(rank)
    check(world, above, workers)
