"""Modes of regions below modes of the run above: every contribution of every worker counts once."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from paramserver.tests.cluster import Cluster
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
}
PAIRS = [
    ("async", "localsgd"), ("sync", "fragments"), ("async", "diloco, delayed"), ("async", "async_diloco"),
    ("ssp", "diloco"),
    ("dssp", "localsgd"), ("buffered", "diloco"), ("localsgd", "diloco"), ("localsgd", "async_diloco"),
    ("diloco", "localsgd"),
]  # fmt: skip
FAST = {("async", "localsgd")}


def started(cluster: Cluster, below: str, above: str) -> World:
    world = World(cluster, *ABOVE[above], "--summary", "above.json")
    mode, flags, _ = BELOW[below]
    for rank in range(2):
        world.relay(rank, *flags, mode=mode)
    return world


def check(world: World, below: str, above: str) -> None:
    """Check that each contribution has its weight, and that all samples are in the accounts of the run above."""
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
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    check(world, below, above)


@pytest.mark.slow
@pytest.mark.parametrize(("below", "above"), [("async", "localsgd"), ("ssp", "diloco, delayed")])
def test_a_killed_relay_goes_on_exactly_once(cluster: Cluster, below: str, above: str) -> None:
    world = started(cluster, below, above)
    mode, flags, weight = BELOW[below]
    workers = world.workers(2.0 / weight, delay_s=0.1)
    relay = world.relays[1]
    relay.until(lambda: any(event["version"] >= 10 for event in relay.events("status")), "version 10")
    relay.signal(signal.SIGKILL)
    world.relay(1, *flags, mode=mode)
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert [process.wait() for process in (*world.relays, world.above)] == [0, 0, 0]
    check(world, below, above)
