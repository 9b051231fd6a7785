"""With little memory for uploads: whose turn it is, and who goes while others wait for it."""

from __future__ import annotations

import asyncio

import pytest

from paramserver.common.wire.frames import frame

from ..streams import SMALL, Server, Worker, served, turns


@served(max_staged=1, workers=3)
async def test_uploads_wait_for_their_turn(server: Server) -> None:
    """With memory for one, rank 2's bytes stay with it until ranks 0 and 1 are folded."""
    workers = await server.workers(3)
    for worker in reversed(workers):
        worker.contribute()
        await turns()
        assert server.engine.model.staging.num_lent <= 1
    assert [worker.outcomes for worker in workers] == [["START", "APPLIED"]] * 3
    assert server.engine.run.policy.version == 1
    server.check_no_memory_is_kept()


@served(max_staged=1, workers=2)
async def test_who_is_folded_first_goes_without_contributing(server: Server) -> None:
    """Rank 1 waits for memory behind rank 0; rank 0 is killed while it computes: rank 1 is next, at once."""
    first, second = await server.workers(2)
    second.contribute()
    await turns()
    assert server.engine.run.policy.version == 0
    first.stream.close()
    await turns()
    assert server.engine.run.policy.version == 1, "nobody else is live, and the round does not close"
    assert second.outcomes == ["START", "APPLIED"]


@served(max_staged=1, workers=2)
async def test_a_worker_is_replaced_in_the_middle_of_its_upload(server: Server) -> None:
    """The older process hangs and keeps its connection; the newer one must not wait for its memory."""
    old, other = await server.workers(2)
    old.announce()
    await turns()
    new = Worker(server, 0)
    await new.join()
    assert new.outcomes == ["START"]
    assert await old.end() == "REPLACED"
    server.check_no_memory_is_kept()
    new.contribute()
    other.contribute()
    await turns()
    assert new.outcomes == other.outcomes == ["START", "APPLIED"]


@served(max_staged=1, workers=3)
async def test_a_worker_dies_while_it_waits_for_memory(server: Server) -> None:
    first, second, third = await server.workers(3)
    for worker in (second, third):
        worker.announce()
    await turns()
    second.task.cancel()
    await turns()
    assert await second.end() == "cancelled"
    first.contribute()
    third.stream.send(frame(None, 0, [memoryview(bytes(SMALL.exchange_bytes))]))
    await turns()
    assert third.outcomes == ["START", "APPLIED"]
    server.check_no_memory_is_kept()


@pytest.mark.parametrize("num_turns", range(8))
@served(max_staged=1, workers=3)
async def test_a_connection_is_lost_in_the_moment_of_getting_memory(server: Server, num_turns: int) -> None:
    """Memory becomes free, and before the waiting call has run again, it is cancelled."""
    first, second, third = await server.workers(3)
    second.announce()
    await turns()
    first.contribute()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    second.task.cancel()
    await turns()
    assert await second.end() == "cancelled"
    server.check_no_memory_is_kept()
    third.contribute()
    await turns()
    assert third.outcomes == ["START", "APPLIED"]
