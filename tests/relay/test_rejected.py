"""Contributions of a region that the run above rejects: their steps are given up, and too many in a row end the run."""

from __future__ import annotations

import json

import pytest
import torch

from paramserver.tests.cluster import Cluster, Process
from paramserver.tests.relay.world import STEPS, WAITING, World, assert_weights

REJECTS = ("--set", "store.max_norm=100", "--set", "store.on_large=reject", "--set", "store.max_nonfinite=3")
STEP = 6  # of the first large gradient


def regions(
    cluster: Cluster, above: str, num_large: int, *relay_flags: str, below: str = "sync", large: str = "1e4",
    limits: tuple[str, ...] = REJECTS,
) -> tuple[World, list[Process]]:  # fmt: skip
    """Start two regions. The first worker of the second one has so many large gradients."""
    world = World(cluster, above, *limits, below=below)
    large_gradients = {2: f"{STEP} {num_large} {large}"}
    return world, world.start("--history", "relay{rank}.jsonl", *relay_flags, delay_s=0.05, large=large_gradients)


def num_given_up(world: World, workers: list[Process]) -> int:
    """Check the end of a run with a rejection. Returns how many steps of the second region are not in the weights."""
    weights = world.wait(workers)
    events = world.relays[1].events("region_not_counted")
    assert ["rejected the contribution (store.on_nonfinite, " in event["meaning"] for event in events] == [True]
    assert not world.relays[0].events("region_not_counted")
    assert torch.equal(weights[2] == 0, weights[3] == 0)
    given_up = weights[2] == 0
    assert int(given_up.sum()) == events[0]["steps"] and events[0]["samples"] == 2 * events[0]["steps"]
    assert given_up[STEP]
    # Each other step counts once. With a region alone, at the end, the run above does not halve it.
    others = torch.cat([weights[:2].flatten(), weights[2:, ~given_up].flatten()])
    assert_weights(others, 1.0, 2.0)
    assert_weights(others[: STEPS // 2])
    above = json.loads((world.cluster.folder / "above.json").read_text())["workers"]
    assert [worker["samples"] for worker in above] == [2 * STEPS, 2 * (STEPS - int(given_up.sum()))]
    assert [worker["rejected"] for worker in above] == [0, 1]
    done = world.cluster.command("launch", "check", "above.jsonl", "relay0.jsonl", "relay1.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    return int(given_up.sum())


@pytest.mark.parametrize(
    ("above", "relay_flags", "below", "num_steps"),
    [
        ("sync", (), "sync", 1),
        ("diloco", (), "sync", 4),
        pytest.param("diloco", WAITING, "sync", 4, marks=pytest.mark.slow),
        pytest.param("diloco", (), "allreduce", 4, marks=pytest.mark.slow),
    ],
)
def test_the_steps_of_a_rejected_contribution_are_given_up(
    cluster: Cluster, above: str, relay_flags: tuple[str, ...], below: str, num_steps: int
) -> None:
    assert num_given_up(*regions(cluster, above, 1, *relay_flags, below=below)) == num_steps


@pytest.mark.slow
def test_a_mean_that_overflows_at_the_border_is_given_up(cluster: Cluster) -> None:
    """It is finite in the region, and not in the codec of the border."""
    world, workers = regions(cluster, "sync", 1, "--set", "upstream.codec=bf16", large="1e39", limits=())
    assert num_given_up(world, workers) == 1
    assert "NaN or Inf" in world.above.output


@pytest.mark.parametrize("above", ["sync", "diloco"])
def test_too_many_rejected_contributions_in_a_row_end_the_run(cluster: Cluster, above: str) -> None:
    world, workers = regions(cluster, above, STEPS)
    assert world.above.wait() == 16
    sentence = "rank 1 sent 3 contributions with a gradient of norm"
    assert sentence in world.above.output
    assert [relay.wait() for relay in world.relays] == [16, 16]
    assert all(sentence in relay.output for relay in world.relays)
    assert [worker.wait() for worker in workers] == [16] * 4
    assert all(sentence in worker.output for worker in workers)
