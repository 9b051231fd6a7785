"""Bytes between a region and the server above, and both tiers with certificates and a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paramserver.tests.certificates import certs, flags
from paramserver.tests.cluster import Cluster

pytestmark = pytest.mark.slow

STEPS, MANY = 64, 2_048
_LONG_S = 400.0  # for 2,048 steps of six workers on a busy machine


def border_bytes(cluster: Cluster, above: tuple[str, ...], num_regions: int, relay: tuple[str, ...], steps: int) -> int:
    """Bytes to and from the server above, which has three workers in each region, or six workers."""
    summary = cluster.folder / "summary.json"
    server = cluster.server(
        "--workers", str(num_regions or 6), "--steps", str(steps), "--summary", str(summary), *above
    )
    top, relays, addresses = cluster.address, [], []
    for region in range(num_regions):
        argv = ("--mode", "sync", "--workers", "3", "--upstream", top, "--upstream-rank", str(region))
        argv += ("--set", "worker.transports=grpc")  # as over a border, where no memory is shared
        relays.append(cluster.server(*argv, *relay))
        addresses.append(cluster.address)
    workers = []
    for number in range(6):
        cluster.address = addresses[number // 3] if addresses else top
        workers.append(cluster.script(number % 3 if num_regions else number, "wide.py"))
    assert [worker.wait(_LONG_S) for worker in workers] == [0] * 6
    assert [process.wait() for process in (*relays, server)] == [0] * (num_regions + 1)
    workers_of_run = json.loads(summary.read_text())["workers"]
    assert {worker["training_steps"] for worker in workers_of_run} == {steps}
    return sum(worker["bytes_sent"] + worker["bytes_received"] for worker in workers_of_run)


@pytest.mark.timeout(900)
def test_bytes_over_the_border(cluster: Cluster) -> None:
    """Two regions of three: at most 1.05 / 3 in the same mode, 1 / 600 with an exchange every 32 steps and q4."""
    flat = border_bytes(cluster, ("--mode", "sync"), 0, (), STEPS)
    same = border_bytes(cluster, ("--mode", "sync"), 2, (), STEPS)
    q4 = ("--set", "upstream.codec=q4", "--set", "upstream.reply_codec=q4")
    rare = border_bytes(cluster, ("--mode", "diloco", "--local-steps", "32"), 2, q4, MANY)
    part = rare / (flat * MANY / STEPS)  # a flat run sends the same for each step
    print(f"flat {flat:,}, the same mode {same / flat:.4f}, 32 steps and q4 1/{1 / part:.0f}")
    assert same <= 1.05 / 3 * flat
    assert part <= 1 / 600


def test_certificates_and_a_token_on_both_tiers(cluster: Cluster, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    certs("init", lab, "--workers", "1")
    secured = (*flags(lab, "server"), "--set", "security.mutual=true")
    cluster.server("--mode", "sync", "--workers", "1", "--steps", "10", *secured)
    refused = cluster.command("ps", "--mode", "sync", "--upstream", cluster.address, "--listen", "127.0.0.1:0")
    assert refused.returncode == 11, refused.stderr
    as_worker = [f"--set=upstream.{name}={lab}/rank-0.{end}" for name, end in (("cert", "crt"), ("key", "key"))]
    relay = cluster.server("--mode", "sync", "--workers", "1", "--upstream", cluster.address, *secured, *as_worker)
    assert cluster.worker(0, *flags(lab, "rank-0"), "--task", "linear").wait() == 0
    assert relay.wait() == 0
