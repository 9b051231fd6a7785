"""Regions: relays, their workers and the server above in processes of their own; every contribution counts once."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import Cluster
from paramserver.tests.relay.world import ABOVE, STEPS, World


def some(fast: set[str]) -> list[Any]:
    """The names of ABOVE; those that are not `fast` are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in ABOVE]


@pytest.mark.parametrize("name", some({"sync", "localsgd"}))
def test_every_contribution_of_two_regions_counts_once(cluster: Cluster, name: str) -> None:
    mode, flags, relay_flags, scale = ABOVE[name]
    world = World(cluster, mode, *flags)
    relays = [world.relay(rank, *relay_flags) for rank in range(2)]
    workers = world.workers(scale)
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*relays, world.above)] == [0, 0, 0]
    weights = world.weights()
    # async_diloco also steps along the delta of one region alone, which is then not halved.
    expected = torch.ones_like(weights) if mode != "async_diloco" else weights.round().clamp(1, 2)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)
    shares = [line for worker in workers for line in worker.output.split("\n") if line.startswith("workers")]
    assert sorted(shares) == [f"workers 4 index {index}" for index in range(4)]


@pytest.mark.parametrize("name", [pytest.param("sync", marks=pytest.mark.slow), "localsgd"])
def test_a_killed_relay_goes_on_exactly_once(cluster: Cluster, name: str) -> None:
    mode, flags, relay_flags, scale = ABOVE[name]
    world = World(cluster, mode, *flags)
    for rank in range(2):
        world.relay(rank, *relay_flags)
    workers = world.workers(scale, delay_s=0.05)
    relay = world.relays[1]
    relay.until(lambda: any(event["version"] >= 6 for event in relay.events("status")), "version 6")
    relay.kill()
    world.relay(1, *relay_flags)
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    torch.testing.assert_close(world.weights(), torch.ones(4, STEPS, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync", "localsgd"])
def test_a_server_above_that_goes_back_takes_its_regions_with_it(cluster: Cluster, name: str) -> None:
    mode, flags, relay_flags, scale = ABOVE[name]
    world = World(cluster, mode, *flags, "--checkpoint-dir", "snapshots", "--checkpoint-every", "4")
    for rank in range(2):
        world.relay(rank, *relay_flags)
    workers = world.workers(scale, delay_s=0.05)
    above = world.above
    above.until(lambda: any(event["version"] for event in above.events("snapshot")), "a later snapshot")
    above.kill()
    world.restart_above()
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    torch.testing.assert_close(world.weights(), torch.ones(4, STEPS, dtype=torch.float64), rtol=0, atol=1e-9)


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
    workers = world.workers(4.0, delay_s=0.05)
    if is_waiting:
        workers[0].until(
            lambda: any("the server above" in line["reason"] for line in workers[0].events("waiting")), "wait"
        )
    else:
        relay.until(lambda: any(event["version"] >= 2 for event in relay.events("status")), "version 2")
    relay.signal(signal.SIGTERM)
    assert relay.wait() == 143


KILLS = 5
LAST_KILL = STEPS - 8  # a relay that dies when the run above is over finds no server above


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(40))
def test_kills_of_a_relay_at_seeded_points(cluster: Cluster, seed: int) -> None:
    """200 kills in all, of both relays, while the run above waits for each exchange or not."""
    chance = random.Random(seed)
    mode, flags, relay_flags, scale = ABOVE[chance.choice(["sync", "localsgd", "diloco"])]
    world, often = World(cluster, mode, *flags), ("--set", "server.status_interval_s=0.05")
    for rank in range(2):
        world.relay(rank, *relay_flags, *often)
    workers = world.workers(scale, delay_s=0.1)
    for _ in range(KILLS):
        rank, more = chance.randrange(2), chance.randrange(1, 3)
        relay = world.relays[rank]
        start = relay.event("status")["version"]
        goal = min(start + more, LAST_KILL)
        relay.until(
            lambda relay=relay, goal=goal: any(event["version"] >= goal for event in relay.events("status")),
            f"version {goal}",
        )
        relay.kill()
        world.relay(rank, *relay_flags, *often)
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    torch.testing.assert_close(world.weights(), torch.ones(4, STEPS, dtype=torch.float64), rtol=0, atol=1e-9)
