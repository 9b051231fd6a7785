"""Contributions that lie, overflow and are too large, through the real programs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

STEPS = 6


@pytest.mark.slow
def test_a_worker_lies_then_sends_nan_then_what_ends_the_run(cluster):
    """Two of three send 1 and the weights go down by 1 a step, whatever the third does: -10 is left out, NaN is
    skipped and the two have their mean, and 1e30 is beyond what this run puts up with at all."""
    server = cluster.server(
        "--mode", "sync", "--workers", "3", "--steps", str(STEPS), "--save", "w.safetensors",
        "--set", "policy.aggregation=trimmed_mean", "--set", "store.on_nonfinite=skip",
        "--set", "store.max_norm=1e3", "--set", "store.on_large=halt",
    )  # fmt: skip
    honest = [cluster.script(rank, "constant.py", str(STEPS), "1") for rank in (0, 2)]
    liar = cluster.script(1, "constant.py", str(STEPS), "-10", "3:nan", "5:1e30")
    assert [process.wait() for process in (server, liar, *honest)] == [16] * 4, server.output
    weights = load_file(cluster.folder / "w.safetensors")["seen"]
    assert torch.equal(weights, torch.full((8 * STEPS,), -4.0)), "four rounds, each by 1"
    for output in (server.output, liar.output):
        for words in ("rank 1", "norm 6.928e+30", "contribution 5", "store.max_norm is 1000", "version 4"):
            assert words in output
        assert "Traceback" not in output
    rows = {row["rank"]: (row["rejected"], row["skipped"]) for row in server.event("summary")["workers"]}
    assert rows == {0: (0, 0), 1: (1, 1), 2: (0, 0)}
    assert server.event("few_contributions")["count"] == 2
    assert "counted as a contribution, nothing folded" in liar.event("rejected")["reason"]
