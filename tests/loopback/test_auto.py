"""`worker.codec=auto` between real processes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = """
import time, torch, paramserver
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(90, 300), torch.nn.Tanh(), torch.nn.Linear(300, 90))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    while not session.is_done:
        optimizer.zero_grad()
        (model(torch.ones(8, 90)) - 1).pow(2).mean().backward()
        optimizer.step()
    session.finish()
"""


def trained(cluster, shards=1, **env):
    """One worker's `auto_codec` lines, of a run of 12 steps."""
    (cluster.folder / "script.py").write_text(SCRIPT)
    flags = ("--mode", "sync", "--workers", "1", "--steps", "12", "--shards", str(shards), "--summary", "s.json")
    server = cluster.server(*flags)
    others = [cluster.shard(number, shards) for number in range(1, shards)]
    worker = cluster.script(0, cluster.folder / "script.py", PS_WORKER__CODEC="auto", **env)
    assert worker.wait() == 0, worker.output
    assert [process.wait() for process in (server, *others)] == [0] * shards
    return worker.events("auto_codec")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_slow_link_gets_what_is_least(cluster, shards):
    """215 KB of gradients at 10 Mbit/s: a fifth of a second raw, of which a busy machine computes one step or many."""
    transports = json.dumps(["direct", "grpc"])
    (chosen,) = trained(cluster, shards, PS_WORKER__MAX_MBIT="10", PS_WORKER__TRANSPORTS=transports)
    assert chosen["codec"] in ("int8", "q4") and chosen["step"] == 5
    assert 0 < float(chosen["up"].split()[0]) <= 10 and 0 < float(chosen["down"].split()[0]) <= 10
    assert "GB/s" in chosen["encodes_decodes"]
    (row,) = json.loads((cluster.folder / "s.json").read_text())["workers"]
    assert row["codec"] == chosen["codec"]


SWITCHED = """
import torch, paramserver
from paramserver.worker.transports.auto.measuring import Auto
model = torch.nn.Linear(90, 300, bias=False)
torch.nn.init.zeros_(model.weight)
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    count = lambda auto: "q4" if optimizer.progress.num_counted < 6 else "raw"
    session._exchange.auto.__class__ = type("Switched", (Auto,), {"codec": property(count)})
    while not session.is_done:
        chance = torch.Generator().manual_seed(optimizer.progress.num_counted)
        model.weight.grad = torch.randn(model.weight.shape, generator=chance)
        session.record(num_samples=1)
        optimizer.step()
    session.finish()
"""


def test_a_switch_to_raw_sends_all_that_was_kept_and_loses_nothing(cluster):
    (cluster.folder / "switched.py").write_text(SWITCHED)
    flags = ("--mode", "sync", "--workers", "1", "--steps", "12", "--summary", "s.json", "--save", "w.safetensors")
    server = cluster.server(*flags)
    told = {"PS_WORKER__CODEC": "auto", "PS_WORKER__TRANSPORTS": json.dumps(["direct", "grpc"])}
    worker = cluster.script(0, cluster.folder / "switched.py", **told)
    assert [process.wait() for process in (worker, server)] == [0, 0], worker.output
    sent = sum(torch.randn(300, 90, generator=torch.Generator().manual_seed(step)) for step in range(12))
    torch.testing.assert_close(load_file(cluster.folder / "w.safetensors")["weight"], -sent, rtol=0, atol=1e-4)
    (row,) = json.loads((cluster.folder / "s.json").read_text())["workers"]
    assert (row["codec"], row["residual_norm"], row["residuals_lost"], row["residual_lost_norm"]) == ("raw", 0, 0, 0)
    whole = 4 * 90 * 300
    assert row["bytes_sent"] < 9 * whole, "with the first weights; five contributions of twelve were in q4"
