"""`ps-launch --estimate`: a few real steps, and what all would take and cost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.tests.loopback.conftest import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_an_estimate_leaves_nothing_behind(cluster: Cluster) -> None:
    told = cluster.command(
        "launch", "-n", "2", "--task", "xor", "--mode", "sync,localsgd", "--steps", "100000", "--estimate", "--save",
        "w.safetensors", "--checkpoint-dir", "snapshots", "--set", "cost.per_hour=36", "--set", "slowdown.base_s=0.02",
        "--local-steps", "4", "--set", "policy.backup_workers=1",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    rows = [line.split() for line in told.stdout.splitlines() if re.match(r"(sync|localsgd) ", line)]
    assert [row[0] for row in rows] == ["sync", "localsgd"]
    for row in rows:
        assert 20 <= float(row[1].replace(",", "")) < 200  # ms: each step sleeps 20
        cost = float(row[row.index("USD") - 1].replace(",", ""))
        assert 20.0 <= cost < 200.0  # 1 cent a second
    assert not (cluster.folder / "w.safetensors").exists() and not (cluster.folder / "snapshots").exists()


def test_what_cannot_be_estimated_is_said(cluster: Cluster) -> None:
    told = cluster.command("launch", "-n", "2", "--task", "xor", "--epochs", "3", "--estimate")
    assert told.returncode == 2
    assert "does not say how many steps it has" in told.stderr and "--steps N" in told.stderr
