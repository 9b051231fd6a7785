"""Contributions while the tensor thread is busy, and more of them than may be staged."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from paramserver.proto import parameter_server_pb2 as pb

from ..streams import LARGE, Server, Worker, served, turns, weight_of


@pytest.mark.parametrize("shares", [False, True], ids=["tcp", "segments"])
@served(layout=LARGE, max_staged=1, workers=5, steps=2, policy={"aggregation": "median"})
async def test_a_median_holds_every_workers_gradient_to_the_commit(server: Server, shares: bool) -> None:
    """More than may be staged at once: what is folded leaves the staging memory, and comes back to it."""
    workers = [Worker(server, rank) for rank in range(5)]
    for worker in workers:
        await (worker.share() if shares else worker.join())
    await server.settle()
    for step in (1, 2):
        for worker, value in zip(workers, [1.0, -900.0, 2.0, 3.0, 900.0], strict=True):
            if shares:
                worker.segment.payload.view(torch.float32).fill_(value)
                worker.announce(step, in_shared_memory=True, version=step - 1)
                worker.send(out_of_band=LARGE.exchange_bytes)
            else:
                worker.contribute(step, value, version=step - 1)
            await server.settle()
        assert all(worker.outcomes == ["START"] + ["APPLIED"] * step for worker in workers)
        assert weight_of(server) == -1.0 * step
        server.check_no_memory_is_kept()
        for worker in workers:
            if shares:
                worker.send(taken=pb.Taken())
        await server.settle()
    assert len(server.engine.model.staging._bytes) <= (0 if shares else 6)


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_connection_is_lost_while_its_contribution_is_looked_at(server: Server) -> None:
    """The upload is whole, the tensor thread is busy, the worker is killed: its memory comes back."""
    first, second = await server.workers(2)
    is_busy, go_on = threading.Event(), threading.Event()
    server.engine.tensors.submit(lambda: (is_busy.set(), go_on.wait(10)))
    await asyncio.to_thread(is_busy.wait, 10)
    first.contribute()
    await turns()
    assert server.engine.model.staging.num_lent == 1
    first.task.cancel()
    await turns()
    go_on.set()
    assert await first.end() == "cancelled"
    second.contribute()
    await server.settle()
    assert server.engine.run.policy.version == 1
    server.check_no_memory_is_kept()


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_worker_is_replaced_while_its_contribution_is_looked_at(server: Server) -> None:
    """Whole, but not accepted yet: the newer process begins at the same step, and nothing is folded twice."""
    old, other = await server.workers(2)
    is_busy, go_on = threading.Event(), threading.Event()
    server.engine.tensors.submit(lambda: (is_busy.set(), go_on.wait(10)))
    await asyncio.to_thread(is_busy.wait, 10)
    old.contribute(value=100.0)
    await turns()
    new = Worker(server, 0)
    await new.join()
    go_on.set()
    await server.settle()
    assert await old.end() == "REPLACED"
    server.check_no_memory_is_kept()
    for worker in (other, new):
        worker.contribute(value=1.0)
        await server.settle()
    assert new.outcomes == other.outcomes == ["START", "APPLIED"]
    assert torch.equal(server.engine.model.store.tensors()["w"], torch.full((100_000,), -0.5))
