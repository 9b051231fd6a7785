"""No contribution that is refused keeps memory, or a round."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paramserver.common.wire.checks import struct

from ..streams import Server, Worker, served, turns


@served(max_staged=2, workers=2)
async def test_every_refused_upload_gives_its_memory_back(server: Server) -> None:
    wrong = [{"num_bytes": 2**40}, {"num_bytes": 0}, {"num_samples": 2**63}, {"codec": "nonsense"}, {"seq": 7}]
    _, other = await server.workers(2)
    for fields in wrong:
        worker = Worker(server, 0)  # replaces the one before
        await worker.join()
        worker.contribute(**fields)
        await turns()
        assert await worker.end() == ("SEQ_GAP" if "seq" in fields else "BAD_REQUEST"), fields
        server.check_no_memory_is_kept()
    assert other.outcomes == ["START"]


@pytest.mark.parametrize("lr", [math.nan, math.inf, "fast", None, [0.1], {}], ids=repr)
@served(max_staged=1, workers=2)
async def test_a_learning_rate_that_is_none(server: Server, lr: Any) -> None:
    """A broken schedule of one worker is its own problem: refused, and nobody else notices."""
    broken, other = await server.workers(2)
    other.contribute()
    broken.contribute(hyperparameters=[struct({"lr": lr})])
    await turns()
    assert not server.engine.finished.done(), f"the run ended: {server.engine.finished.exception()!r}"
    assert await broken.end() == "BAD_REQUEST"
    server.check_no_memory_is_kept()
    assert other.outcomes == ["START", "APPLIED"]
    assert bool(torch.isfinite(server.engine.model.store.tensors()["w"]).all())
