"""The optimizer that a session gives, in the hands of trainers and of loops of all kinds: right, or stopped with one
sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from paramserver.tests.loopback.conftest import Cluster

HERE = Path(__file__).parent / "optimizer"
TCP = ("--set", "server.shared_memory=false")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("flags", "shards"),
    [
        pytest.param(("--mode", "sync"), 1, id="shared memory"),
        pytest.param(("--mode", "localsgd", "--local-steps", "1", *TCP), 1, id="localsgd over TCP"),
        pytest.param(("--mode", "sync", *TCP), 1, id="TCP", marks=slow),
        pytest.param(("--mode", "localsgd", "--local-steps", "3"), 1, id="localsgd", marks=slow),
        pytest.param(("--mode", "async", "--pipelined"), 1, id="pipelined", marks=slow),
        pytest.param(("--mode", "sync", "--shards", "2"), 2, id="shards", marks=slow),
    ],
)
def test_a_model_that_moves_and_an_optimizer_that_is_loaded_go_on(cluster: Cluster, flags, shards):
    server = cluster.server("--workers", "1", "--steps", "8", "--save", "w.safetensors", *flags)
    if shards > 1:
        cluster.shard(1, shards)
    script = cluster.script(0, HERE / "moves.py")
    assert script.wait() == 0, script.output
    assert server.wait() == 0, server.output
    assert load_file(cluster.folder / "w.safetensors")["0.weight"].unique().tolist() == [-8.0]
