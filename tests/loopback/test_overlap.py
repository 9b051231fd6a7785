"""Gradients that leave during backward, with the real executables: the same weights to the last bit, also where
connections break in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.cluster import end_well


@pytest.mark.slow
def test_overlap_with_shards_and_codecs(cluster: Any) -> None:
    """Each shard's part comes by itself; what is encoded comes down whole, and goes up tensor by tensor, with what was
    left out of the last ones."""
    env = {"PS_WORKER__TRANSPORTS": "direct,grpc", "PS_WORKER__REPLY_CODEC": "bf16", "PS_WORKER__CODEC": "q4"}
    found = []
    for overlap in (False, True):
        server = cluster.server(
            "--mode", "sync", "--workers", "2", "--steps", "8", "--shards", "2", "--save", "w.safetensors",
            "--summary", "s.json",
        )  # fmt: skip
        shard = cluster.shard(1, 2)
        environ = env | {"PS_WORKER__OVERLAP": str(overlap).lower()}
        workers = [cluster.script(rank, "wide.py", **environ) for rank in range(2)]
        end_well(*workers, server, shard)
        found.append(load_file(cluster.folder / "w.safetensors"))
        summary = cluster.summary()
        assert all(0 < worker["residual_norm"] < 1 for worker in summary["workers"])
        assert not any(worker["residuals_lost"] for worker in summary["workers"])
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
