"""What workers' own optimizers remember comes with the weights that a report brings, and is kept with them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from paramserver.ps.snapshots.store_state import optimizer_tensors

from ..streams import LARGE, SMALL, Server, served


@pytest.mark.parametrize("layout", [LARGE, SMALL])
def test_it_counts_with_its_weights_and_is_gone_with_weights_that_come_without(layout):
    @served(workers=1, layout=layout, mode="allreduce")
    async def bring(server: Server) -> None:
        (worker,) = await server.workers(1)
        momentum = torch.arange(layout.exchange_bytes // 4, dtype=torch.float32)
        worker.tell("optimizer", save({"momentum_buffer/w": momentum}), 1 << 18)
        worker.contribute(1, 2.0, generation=1)
        await server.settle()
        store = server.engine.model.store
        assert bool((store.weights.view(torch.float32) == 2.0).all())
        version, found = optimizer_tensors(server.engine.model)
        assert version == 1
        assert found.keys() == {"momentum_buffer/w"}
        assert torch.equal(found["momentum_buffer/w"], momentum)
        worker.contribute(2, 3.0, version=1, generation=1)
        await server.settle()
        assert bool((store.weights.view(torch.float32) == 3.0).all())
        assert optimizer_tensors(server.engine.model) == (2, {})
        server.check_no_memory_is_kept()

    bring()


@pytest.mark.parametrize(
    ("payload", "fields"),
    [
        (b"no safetensors file", {}),
        (save({"momentum_buffer/w": torch.zeros(7)}), {}),
        (save({"momentum_buffer/v": torch.zeros(8)}), {}),
        (save({"momentum_buffer/w": torch.zeros(8, dtype=torch.float64)}), {}),
        (save({"momentum_buffer/w": torch.zeros(8)}), {"offset": 8}),
        (save({"momentum_buffer/w": torch.zeros(8)}), {"num_bytes": 1 << 40}),
    ],
)
@served(workers=1, layout=SMALL, mode="allreduce")
async def test_what_is_none_of_this_model_is_refused(server: Server, payload, fields):
    (worker,) = await server.workers(1)
    worker.tell("optimizer", payload, 1 << 18, **fields)
    worker.contribute(1, generation=1)
    await server.settle()
    assert await worker.end() == "BAD_REQUEST"


@pytest.mark.parametrize("goes", [False, True])
@served(workers=2, layout=SMALL, max_staged=1, mode="localsgd")
async def test_it_waits_for_memory_as_a_payload_does(server: Server, goes: bool):
    """With room for one upload another worker's is not taken before the first has contributed, or gone."""
    workers = await server.workers(2)
    payload = save({"momentum_buffer/w": torch.arange(8, dtype=torch.float32)})
    for worker in workers:
        worker.tell("optimizer", payload, 1 << 18)
        await server.settle()
    staging = server.engine.model.staging
    assert (staging.num_lent, staging.num_waiting) == (1, 1)
    if goes:
        workers[0].stream.close()
        await server.settle()
        assert (staging.num_lent, staging.num_waiting) == (1, 0)
    else:
        workers[0].contribute(1)
        await server.settle()
    workers[1].contribute(1)
    await server.settle()
    assert workers[1].outcomes == ["START", "APPLIED"]
    server.check_no_memory_is_kept()
