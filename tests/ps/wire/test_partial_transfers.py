"""A payload whose stream was lost in its middle: what has come stays, and the rest comes on the next stream."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paramserver.common.codecs.base import payload_bytes
from paramserver.common.codecs.shared.by_tensor import only_rest
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, as_bytes
from paramserver.common.wire.frames import frame
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core import events
from paramserver.ps.wire import partial_transfers

from ..streams import Server, Worker, served

BIG = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (600_000,))])
NUM_BYTES = BIG.exchange_bytes
PIECE = 1 << 20


@pytest.fixture(autouse=True)
def least_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial uploads of more than 1 MiB are kept here, so that these tests need no large model."""
    monkeypatch.setattr(partial_transfers, "_LEAST_BYTES", PIECE)


async def seated(server: Server, rank: int = 0, incarnation: int = 0, **offers: Any) -> Worker:
    """A worker whose heartbeat heartbeats, back from an older stream where it was of an `incarnation`."""
    worker, process = Worker(server, rank), f"process {rank}"
    join = pb.Join(rank=rank, process=process)
    if incarnation:
        join.incarnation, join.run, join.server_incarnation = incarnation, "run", 1
    else:
        server.engine.offer(events.HeartbeatBegan(process))
    await worker.join(join=join, settle=server.settle, **offers)
    server.engine.offer(events.Heartbeat(rank, process))
    await server.settle()
    return worker


async def broken(server: Server, rank: int = 0, value: float = 1.0, **facts: object) -> Worker:
    """Of whose contribution one piece came before its stream ended."""
    worker = await seated(server, rank)
    worker.announce(**facts)
    worker.piece(0, PIECE, value)
    await server.settle()
    worker.stream.close()
    await server.settle()
    return worker


async def back(server: Server, rank: int = 0, **offers: Any) -> tuple[Worker, pb.PartialTransfer | None]:
    incarnation = server.engine.run.roster.workers[rank].incarnation
    worker = await seated(server, rank, incarnation, **offers)
    welcome = worker.stream.received[0].header
    assert welcome.resumed
    return worker, welcome.partial_transfer if welcome.HasField("partial_transfer") else None


@served(layout=BIG, workers=1, mode="async")
async def test_the_rest_comes_on_the_next_stream(server: Server) -> None:
    await broken(server)
    worker, offered = await back(server)
    items_ = torch.ones(PIECE // 4).numpy().tobytes()
    assert (offered.seq, offered.payload_bytes, offered.codec, list(offered.ranges)) == (
        1, NUM_BYTES, "raw", [0, PIECE],
    )  # fmt: skip
    assert offered.crc == zlib.crc32(items_)
    worker.continue_()
    worker.piece(PIECE, NUM_BYTES - PIECE)
    await server.settle()
    assert worker.outcomes == ["APPLIED"]
    assert torch.equal(worker.weights(), torch.full((600_000,), -0.5))
    server.check_no_memory_is_kept()


@served(layout=BIG, workers=1, mode="async")
async def test_it_may_break_off_more_than_once_and_from_within(server: Server) -> None:
    first = await seated(server)
    first.announce()
    first.piece(PIECE, 4000)
    await server.settle()
    first.task.cancel()
    await server.settle()
    second, offered = await back(server)
    assert list(offered.ranges) == [PIECE, PIECE + 4000]
    second.continue_()
    second.piece(0, PIECE)
    await server.settle()
    third, offered = await back(server)  # the server has not seen the end of the second
    assert list(offered.ranges) == [0, PIECE + 4000]
    third.continue_()
    third.piece(PIECE + 4000, NUM_BYTES - PIECE - 4000)
    await server.settle()
    assert third.outcomes == ["APPLIED"]
    assert torch.equal(third.weights(), torch.full((600_000,), -0.5))
    server.check_no_memory_is_kept()


@served(layout=BIG, workers=1, mode="async")
async def test_nan_in_what_came_before_is_still_seen(server: Server) -> None:
    await broken(server, value=math.nan)
    worker, _ = await back(server)
    worker.continue_()
    worker.piece(PIECE, NUM_BYTES - PIECE)
    await server.settle()
    assert worker.outcomes == ["REJECTED"]
    server.check_no_memory_is_kept()


@served(layout=BIG, workers=1, mode="async")
async def test_all_of_it_may_come_again(server: Server) -> None:
    await broken(server, value=7.0)
    worker, _ = await back(server)
    worker.contribute()
    await server.settle()
    assert torch.equal(worker.weights(), torch.full((600_000,), -0.5))
    server.check_no_memory_is_kept()


@served(layout=BIG, max_staged=1, workers=2, mode="async")
async def test_whoever_needs_the_memory_has_it(server: Server) -> None:
    other = await seated(server, 1)
    await broken(server)
    worker, offered = await back(server)
    assert offered is not None
    other.contribute()
    await server.settle()
    assert other.outcomes == ["START", "APPLIED"]
    worker.continue_()
    worker.piece(PIECE, NUM_BYTES - PIECE)
    await server.settle()
    assert await worker.end() == "ok"
    worker, offered = await back(server)
    assert offered is None
    server.check_no_memory_is_kept()


@served(layout=BIG, max_staged=1, workers=2, mode="async")
async def test_nothing_is_kept_that_somebody_waits_for(server: Server) -> None:
    other, worker = await seated(server, 1), await seated(server, 0)
    worker.announce()
    worker.piece(0, PIECE)
    await server.settle()
    other.contribute()
    await server.settle()
    assert other.outcomes == ["START"]
    worker.stream.close()
    await server.settle()
    assert other.outcomes == ["START", "APPLIED"]
    server.check_no_memory_is_kept()


@pytest.mark.parametrize("how", ["the process died", "another process", "its lease ended"])
@served(layout=BIG, workers=1, mode="async")
async def test_it_goes_with_its_process(server: Server, how: str) -> None:
    await broken(server)
    assert server.engine.model.staging.num_lent == 1
    match how:
        case "the process died":
            server.engine.offer(events.HeartbeatStopped("process 0"))
        case "another process":
            await Worker(server, 0).join()
        case _:
            server.engine.run.roster.heard_at[0] -= 1000.0
            server.engine.tick()
    await server.settle()
    server.check_no_memory_is_kept()


LIES: dict[str, Callable[[Worker], object]] = {
    "what is here once more": lambda worker: [worker.continue_(), worker.piece(PIECE - 4, 400)],
    "another number": lambda worker: worker.continue_(2),
    "another codec": lambda worker: worker.continue_(codec="bf16", num_bytes=NUM_BYTES // 2),
    "after a Begin": lambda worker: [worker.begin(), worker.continue_()],
    "placed in no segment": lambda worker: worker.continue_(in_shared_memory=True),
    "another size": lambda worker: worker.continue_(num_bytes=NUM_BYTES - 4),
}


@pytest.mark.parametrize("how", LIES)
@served(layout=BIG, workers=1, mode="async")
async def test_a_worker_that_lies_about_it_is_refused(server: Server, how: str) -> None:
    await broken(server)
    worker, _ = await back(server)
    LIES[how](worker)
    await server.settle()
    assert await worker.end() == ("ok" if how == "another number" else "BAD_REQUEST")
    server.engine.offer(events.HeartbeatStopped("process 0"))
    await server.settle()
    server.check_no_memory_is_kept()


@served(layout=BIG, workers=None, mode="async", max_staged=2)
async def test_many_partial_transfers_take_no_more_than_uploads_may(server: Server) -> None:
    for rank in range(5):
        await broken(server, rank)
        assert server.engine.model.staging.num_lent <= 2
    (other, _) = await back(server, 4)
    other.contribute()
    await server.settle()
    assert other.outcomes == ["APPLIED"]


@served(layout=BIG, workers=1, mode="async")
async def test_a_mistake_after_the_whole_payload_gives_its_memory_back(server: Server) -> None:
    """The script's State was to be longer."""
    worker = await seated(server)
    worker.send(state=pb.State(num_bytes=8, piece=b"half"))
    worker.contribute(position=pb.Position(step=0, local_steps=1))
    await server.settle()
    assert await worker.end() == "BAD_REQUEST"
    server.check_no_memory_is_kept()


TWO = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (1000, 4000)) for name in ("v", "w")])


@pytest.mark.parametrize("how", ["continued", "another size", "other tensors"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_fragment_that_broke_off_is_continued(how: str, is_first: bool) -> None:
    """Its size depends on its tensors, which are named only by the Contribution, after its Begin."""
    policy = {"fragments": 2, "local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0}

    @served(layout=TWO, workers=1, mode="diloco", policy=policy)
    async def play(server: Server) -> None:
        codec = CODECS.load("int8")()
        offers = {"codecs": ["int8"], "contribution": pb.RunSettings.DELTA_OF_FRAGMENT}
        worker = await seated(server, **offers)
        seq = 1
        if not is_first:  # of the other fragment
            first, facts = encoded(codec, without=[0])
            worker.send_encoded(seq, first, **facts)
            await server.settle()
            seq = 2
        data, facts = encoded(codec, without=[1])
        data, facts = bytes(data), {**facts, "version": seq - 1}
        worker.announce(seq, **facts)
        worker.stream.send(frame(None, 0, [memoryview(data)[:PIECE]]))
        await server.settle()
        worker.stream.close()
        await server.settle()
        again, offered = await back(server, **offers)
        assert (offered.seq, offered.payload_bytes, list(offered.ranges)) == (seq, len(data), [0, PIECE])
        if how == "another size":
            again.begin(continues=seq, num_bytes=len(data) + 8, codec="int8")
            assert await again.end() == "BAD_REQUEST"
            return
        again.begin(continues=seq, num_bytes=len(data), codec="int8")
        again.announce(seq, **{**facts, "without_gradient": [1] if how == "continued" else []})
        again.stream.send(frame(None, PIECE, [memoryview(data)[PIECE:]]))
        await server.settle()
        if how == "continued":
            assert again.outcomes == ["APPLIED"]
        else:
            assert await again.end() == "BAD_REQUEST"

    play()


def encoded(codec: Any, without: list[int]) -> tuple[memoryview, dict[str, Any]]:
    """A fragment of ones, without these tensors, and the fields that announce it."""
    codec = only_rest(codec, frozenset(TWO.specs[position].name for position in without))
    out = torch.zeros(payload_bytes(codec, TWO), dtype=torch.uint8)
    codec.encoder(TWO).begin(torch.ones(TWO.exchange_bytes // 4).view(torch.uint8), out)
    facts = {"num_bytes": len(out), "codec": "int8", "without_gradient": without}
    return as_bytes(out), facts
