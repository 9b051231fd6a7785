"""Contributions of a region that the run above does not take: no work is lost or counted twice, and accounts agree."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.relay.world import STEPS, World

pytestmark = pytest.mark.slow

DEADLINE = ("--set", "policy.straggler_timeout_s=0.2", "--summary", "above.json")
OUTER = ("--outer-lr", "1", "--outer-momentum", "0")


def until_version(process: Process, version: int) -> None:
    process.until(lambda: any(event["version"] >= version for event in process.events("status")), f"version {version}")


def late_region(cluster: Cluster, mode: str, *flags: str, relay_flags: tuple[str, ...] = ()) -> World:
    """Run two regions, one of which stands still while the run above makes two rounds without it."""
    often = ("--set", "server.status_interval_s=0.05")
    world = World(cluster, mode, *flags, *DEADLINE, *often, min_workers=1)
    for rank in range(2):
        files = ("--summary", f"relay{rank}.json", "--history", f"relay{rank}.jsonl")
        world.relay(rank, *files, *often, *relay_flags)
    workers = world.workers(4.0, delay_s=0.1)
    until_version(world.relays[1], 2)
    late = workers[2:]
    for worker in late:
        worker.signal(signal.SIGSTOP)
    before = world.above.events("status")[-1]["version"]
    until_version(world.above, before + 2)
    for worker in late:
        worker.signal(signal.SIGCONT)
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    codes = [process.wait() for process in (*world.relays, world.above)]
    assert codes == [0, 0, 0], world.above.output
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


@pytest.mark.parametrize(
    ("mode", "flags", "relay_flags"),
    [
        ("localsgd", ("--local-steps", "4"), ()),
        ("diloco", ("--local-steps", "4", *OUTER), ()),
        ("diloco", ("--local-steps", "4", *OUTER), ("--upstream-every", "0")),
    ],
)
def test_work_that_came_too_late_is_in_a_later_round(
    cluster: Cluster, mode: str, flags: tuple[str, ...], relay_flags: tuple[str, ...]
) -> None:
    world = late_region(cluster, mode, *flags, relay_flags=relay_flags)
    below, above, dropped = accounts(cluster)
    assert dropped[1] >= 1, "the late region was never too late"
    weights = world.weights()
    # A round of one region alone has twice the weight. The late region has taken its first steps, and no later ones.
    for weight in weights:
        num = int(weight.count_nonzero())
        torch.testing.assert_close(weight[num:], torch.zeros(STEPS - num, dtype=torch.float64), rtol=0, atol=1e-9)
        torch.testing.assert_close(weight[:num], weight[:num].round().clamp(1, 2), rtol=0, atol=1e-9)
    counted = weights.count_nonzero(dim=1)
    assert above == [int(counted[:2].sum()), int(counted[2:].sum())]
    assert below == [samples + lost(relay) for samples, relay in zip(above, world.relays, strict=True)]


def test_a_gradient_that_came_too_late_is_dropped_as_in_a_flat_run(cluster: Cluster) -> None:
    world = late_region(cluster, "sync")
    below, above, dropped = accounts(cluster)
    assert dropped[1] >= 1, "the late region was never too late"
    weights = world.weights()
    torch.testing.assert_close(weights, weights.round().clamp(0, 2), rtol=0, atol=1e-9)
    counted = weights.count_nonzero(dim=1)
    assert above == [int(counted[:2].sum()), int(counted[2:].sum())]
    assert world.relays[1].events("region_not_counted")
    assert below == [samples + lost(relay) for samples, relay in zip(above, world.relays, strict=True)]
    workers = json.loads((cluster.folder / "relay1.json").read_text())["workers"]
    assert [worker["dropped"] for worker in workers] == [dropped[1]] * 2
