"""An upload that begins before the facts of its contribution are known."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch

from paramserver.proto import parameter_server_pb2 as pb

from ..streams import LARGE, Server, Worker, served, turns


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
@pytest.mark.parametrize("num_before", range(5))
@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_pieces_before_and_after_the_contribution(server: Server, order: list[int], num_before: int) -> None:
    (worker,) = await server.workers(1)
    worker.begin()
    for index, quarter in enumerate([*order, -1]):
        if index == num_before:
            worker.announce()
        if quarter >= 0:
            await turns()
            worker.piece(100_000 * quarter, 100_000, value=float(quarter))
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED"]
    assert worker.weights()[::25_000].tolist() == [0.0, -0.5, -1.0, -1.5]
    server.check_no_memory_is_kept()


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_second_begin_forgets_the_first_attempt(server: Server) -> None:
    """Also that it held NaN, in a part that had been looked through."""
    (worker,) = await server.workers(1)
    for value in (math.nan, 5.0, math.inf):
        worker.begin()
        worker.piece(0, 400_000 if math.isnan(value) else 4000, value)
        await server.settle()
    worker.begin()
    worker.announce()
    worker.piece(0, 400_000, 1.0)
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED"]
    assert torch.equal(worker.weights(), torch.full((100_000,), -0.5))
    server.check_no_memory_is_kept()


HALF = {"codec": "bf16", "num_bytes": LARGE.exchange_bytes // 2}
# What a worker does after a Begin and a piece, and how its call ends.
BEGUN_ENDS: dict[str, tuple[Callable[[Worker], object], str]] = {
    "leave": (lambda worker: worker.send(leave=pb.Leave()), "ok"),
    "stream ends": (lambda worker: worker.stream.close(), "ok"),
    "cancelled": (lambda worker: worker.task.cancel(), "cancelled"),
    "another codec": (lambda worker: worker.announce(**HALF), "BAD_REQUEST"),
    "another size": (lambda worker: worker.announce(num_bytes=4), "BAD_REQUEST"),
    "a bad size again": (lambda worker: worker.begin(num_bytes=2**40), "BAD_REQUEST"),
    "in a segment that is not": (lambda worker: worker.announce(in_shared_memory=True), "BAD_REQUEST"),
    "begun in another way": (lambda worker: worker.begin(**HALF), "BAD_REQUEST"),
    "the same piece": (lambda worker: worker.piece(0, 4000), "BAD_REQUEST"),
    "out_of_band": (lambda worker: worker.send(out_of_band=400, offset=8000), "BAD_REQUEST"),
    "too many samples": (lambda worker: worker.announce(num_samples=2**63), "BAD_REQUEST"),
    "another number": (lambda worker: [worker.announce(seq=7), worker.piece(4000, 396_000)], "SEQ_GAP"),
    "two contributions": (lambda worker: [worker.announce(), worker.announce()], "BAD_REQUEST"),
    "begin after contribution": (lambda worker: [worker.announce(), worker.begin()], "BAD_REQUEST"),
}


@pytest.mark.parametrize("how", BEGUN_ENDS)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@served(layout=LARGE, max_staged=1, workers=2)
async def test_every_end_of_a_begun_upload_gives_its_memory_back_once(server: Server, how: str, is_busy: bool) -> None:
    """Also while the tensor thread still looks through what had come."""
    broken, other = await server.workers(2)
    go_on = threading.Event()
    if is_busy:
        server.engine.tensors.submit(lambda: go_on.wait(10))
    broken.begin()
    broken.piece(0, 4000)
    await turns()
    assert server.engine.model.staging.num_lent == 1
    act, ending = BEGUN_ENDS[how]
    act(broken)
    await turns()
    go_on.set()
    await server.settle()
    assert await broken.end() == ending
    server.check_no_memory_is_kept()
    free = server.engine.model.staging._free
    assert len({id(payload) for payload in free}) == len(free) == 1
    other.contribute()
    await server.settle()
    assert other.outcomes == ["START", "APPLIED"]
    assert torch.equal(other.weights(), torch.full((100_000,), -0.5))


@served(layout=LARGE, max_staged=1, workers=1, steps=1, mode="async")
async def test_finish_after_a_begin_throws_the_upload_away(server: Server) -> None:
    (worker,) = await server.workers(1)
    worker.contribute()
    await server.settle()
    worker.begin()
    worker.piece(0, 4000)
    worker.send(finish=pb.Finish())
    await server.settle()
    server.check_no_memory_is_kept()
    assert worker.kinds[-1] in ("final", None)
    assert torch.equal(worker.weights(), torch.full((100_000,), -0.5))
    worker.send(leave=pb.Leave())
    await server.settle()
    assert await worker.end() == "ok"


@served(workers=1, mode="async")
async def test_what_workers_keep_back_and_lose_is_counted(server: Server) -> None:
    """As each says it of its process; nothing, where there was something, may have been sent. What another process had
    kept is lost with it. At the end it is what is never sent."""
    (worker,) = await server.workers(1)
    for seq, (residual, num, lost) in enumerate([(0.0, 0, 0.0), (3.0, 0, 0.0), (0.0, 0, 0.0), (2.0, 1, 4.0)], 1):
        worker.contribute(seq=seq, version=seq - 1, norm=residual, num_lost=num, lost_norm=lost)
        await server.settle()
    stats = server.engine.run.roster.stats[0]
    assert (stats.residual, stats.residuals_lost, stats.residual_lost) == (2.0, 1, 4.0)
    (another,) = await server.workers(1)
    assert (stats.residual, stats.residuals_lost, stats.residual_lost) == (0.0, 2, 6.0)
    for seq, (num, lost) in enumerate([(1, math.nan), (1, 0.5), (1, 0.5)], 5):
        another.contribute(seq=seq, version=seq - 1, num_lost=num, lost_norm=lost)
        await server.settle()
    another.send(finish=pb.Finish(residual=pb.ResidualInfo(norm=1.5, num_lost=2, lost_norm=0.75)))
    await server.settle()
    assert (stats.residual, stats.residuals_lost, stats.residual_lost) == (1.5, 4, 6.75)
