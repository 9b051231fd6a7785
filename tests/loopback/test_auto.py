"""`worker.codec=auto` between real processes."""

from __future__ import annotations

import json

import pytest

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
