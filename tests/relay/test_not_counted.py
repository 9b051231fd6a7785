"""Contributions of a region that the run above does not take: no work is lost or counted twice, and accounts agree."""

from __future__ import annotations

import json
import signal

import pytest

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.relay.world import OFTEN, WAITING, World, assert_weights, until_version

pytestmark = pytest.mark.slow


def late_region(cluster: Cluster, above: str, relay_flags: tuple[str, ...] = ()) -> World:
    """Run two regions, one of which stands still while the run above makes two rounds without it."""
    world = World(cluster, above, "--set", "policy.straggler_timeout_s=0.2", *OFTEN, min_workers=1)
    files = ("--summary", "relay{rank}.json", "--history", "relay{rank}.jsonl")
    workers = world.start(*files, *relay_flags, delay_s=0.1)
    until_version(world.relays[1], 2)
    late = workers[2:]
    for worker in late:
        worker.signal(signal.SIGSTOP)
    before = world.above.events("status")[-1]["version"]
    until_version(world.above, before + 2)
    for worker in late:
        worker.signal(signal.SIGCONT)
    world.wait(workers)
    checked = cluster.command("launch", "check", "above.jsonl", "relay0.jsonl", "relay1.jsonl")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return world


def accounts(cluster: Cluster) -> tuple[list[int], list[int], list[int]]:
    """Returns the samples of each region as its relay and as the server above count them, and what was dropped."""
    below = [json.loads((cluster.folder / f"relay{rank}.json").read_text())["workers"] for rank in range(2)]
    above = json.loads((cluster.folder / "above.json").read_text())["workers"]
    samples = [sum(worker["samples"] for worker in workers) for workers in below]
    return samples, [worker["samples"] for worker in above], [worker["dropped"] for worker in above]


def lost(relay: Process) -> int:
    """Returns the samples of the region that were too late for the run above."""
    events = relay.events("region_not_counted")
    return sum(event["samples"] for event in events if event["meaning"] == "the run above was over")


@pytest.mark.parametrize(("above", "relay_flags"), [("localsgd", ()), ("diloco", ()), ("diloco", WAITING)])
def test_work_that_came_too_late_is_in_a_later_round(
    cluster: Cluster, above: str, relay_flags: tuple[str, ...]
) -> None:
    world = late_region(cluster, above, relay_flags)
    below, counted_above, dropped = accounts(cluster)
    assert dropped[1] >= 1, "the late region was never too late"
    weights = world.weights()
    # A round of one region alone has twice the weight. The late region has taken its first steps, and no later ones.
    for weight in weights:
        num = int(weight.count_nonzero())
        assert_weights(weight[num:], 0.0, 0.0)
        assert_weights(weight[:num], 1.0, 2.0)
    counted = weights.count_nonzero(dim=1)
    assert counted_above == [int(counted[:2].sum()), int(counted[2:].sum())]
    assert below == [samples + lost(relay) for samples, relay in zip(counted_above, world.relays, strict=True)]


def test_a_gradient_that_came_too_late_is_dropped_as_in_a_flat_run(cluster: Cluster) -> None:
    world = late_region(cluster, "sync")
    below, counted_above, dropped = accounts(cluster)
    assert dropped[1] >= 1, "the late region was never too late"
    weights = world.weights()
    assert_weights(weights, 0.0, 2.0)
    counted = weights.count_nonzero(dim=1)
    assert counted_above == [int(counted[:2].sum()), int(counted[2:].sum())]
    assert world.relays[1].events("region_not_counted")
    assert below == [samples + lost(relay) for samples, relay in zip(counted_above, world.relays, strict=True)]
    workers = json.loads((cluster.folder / "relay1.json").read_text())["workers"]
    assert [worker["dropped"] for worker in workers] == [dropped[1]] * 2
