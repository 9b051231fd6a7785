"""A codec with memory on both sides, between real processes, through real resets.

One file adds it: tests/contract/added/delta.py.

Whichever side counted a payload that the other did not would say so at the next one. Gradients and weights are
multiples of a sixteenth, so nothing is rounded, and the weights say what was applied, and what each worker has seen of
it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paramserver.tests.faults.proxy import Plan, Proxy

TESTS = Path(__file__).parents[1]
STEPS = 25
PADDING = 3000

ADDED = TESTS / "contract" / "added"  # the one file that the codec adds to the product
# A process that starts with this on its path finds the codec by its name, as if its file lay with the others.
KNOWN = f"""
import paramserver.common.codecs
paramserver.common.codecs.__path__.append({str(ADDED)!r})
"""
SCRIPT = f"""
import sys, torch, paramserver
lag = int(sys.argv[1])  # of training steps, until what was contributed is in the weights here
model = torch.nn.Module()
model.seen = torch.nn.Parameter(torch.zeros(2, {STEPS}))
model.padding = torch.nn.Parameter(torch.zeros({PADDING}))
with paramserver.connect() as session:
    optimizer = session.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    while not session.is_done:
        step = optimizer.progress.row.seq
        own = model.seen[session.rank]
        assert (own[: max(0, step - lag)] == -1).all() and (own[step:] == 0).all(), own
        assert (model.padding == model.seen.sum() / 16).all(), "parts of two versions"
        model.seen.grad, model.padding.grad = torch.zeros(2, {STEPS}), torch.full(({PADDING},), 1 / 16)
        model.seen.grad[session.rank, step] = 1.0
        session.record(num_samples=1)
        optimizer.step()
    session.finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("delayed_update", "shards"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_both_sides_remember_the_same_through_resets(cluster, delayed_update, shards):
    assert [file.name for file in ADDED.glob("*.py")] == ["delta.py"]
    (cluster.folder / "sitecustomize.py").write_text(KNOWN)
    script = cluster.folder / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(cluster.folder), os.environ.get("PYTHONPATH", "")])
    codec = {"PYTHONPATH": path, "PS_WORKER__CODEC": "delta", "PS_WORKER__REPLY_CODEC": "delta"}
    server = cluster.server(
        "--mode", "async", "--workers", "2", "--steps", str(STEPS), "--save", "w.safetensors",
        "--shards", str(shards), *(["--delayed-update"] if delayed_update else []), "--set",
        "server.direct=true", **codec,
    )  # fmt: skip
    others = [cluster.shard(number, shards, **codec) for number in range(1, shards)]

    def plan(number: int) -> Plan:
        """Of the first connections, those that carry contributions are lost in the middle of one, or of a reply."""
        if number >= 8:
            return Plan()
        num_bytes = 25_000 // shards
        return Plan(reset_after_up=num_bytes) if number % 4 < 2 else Plan(reset_after_down=num_bytes)

    with Proxy(cluster.address, plan, server.event("listening")["direct_port"]) as proxy:
        cluster.address = proxy.address
        workers = [cluster.script(rank, script, str(int(delayed_update)), **codec) for rank in range(2)]
        assert [worker.wait() for worker in workers] == [0, 0], workers[0].output + workers[1].output
        assert [process.wait() for process in (server, *others)] == [0] * shards
        assert proxy.num_resets >= 2
    assert len(server.events("resumed")) >= 2, "with what was remembered"
    ended = load_file(cluster.folder / "w.safetensors")
    assert torch.equal(ended["seen"], torch.full((2, STEPS), -1.0)), "each contribution is applied once"
    assert torch.equal(ended["padding"], torch.full((PADDING,), -2 * STEPS / 16))
