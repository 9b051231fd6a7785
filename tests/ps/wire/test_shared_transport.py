"""Payloads in memory that worker and server share."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from paramserver.common.wire.segments import Segment, SegmentError, new_segment, open_segment
from paramserver.proto import parameter_server_pb2 as pb

from ..streams import LARGE, Server, Worker, served, turns


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_contribution_in_the_workers_segment(server: Server) -> None:
    """Neither memory of the server nor a copy is needed, and the weights are read where they are made."""
    worker = Worker(server, 0)
    await worker.share()
    for step in range(1, 10):
        worker.write_to_segment(step)
        await server.settle()
        assert worker.stream.received[-1].out_of_band, "the weights came over the connection"
        assert torch.equal(worker.weights(), torch.full((100_000,), -0.5 * step))
        worker.send(taken=pb.Taken())
    await turns()
    server.check_nobody_reads()
    server.check_no_memory_is_kept()
    assert not server.engine.model.publisher._free, "nobody read while another version was made"


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_worker_that_never_says_what_it_has_taken(server: Server) -> None:
    """Its next contribution says so too, or is refused; it must not use up the versions that may be on their way."""
    worker = Worker(server, 0)
    await worker.share()
    for step in range(1, 10):
        worker.write_to_segment(step)
        await server.settle()
        if worker.task.done():
            break
        assert worker.outcomes == ["START"] + ["APPLIED"] * step
    worker.stream.close()
    await turns()
    server.check_nobody_reads()


@served(layout=LARGE, max_staged=1, workers=2, mode="async")
async def test_taken_when_nothing_was_given(server: Server) -> None:
    worker, other = await server.workers(2)
    for _ in range(3):
        worker.send(taken=pb.Taken())
    worker.announce()
    worker.send(taken=pb.Taken())
    worker.piece(0, LARGE.exchange_bytes)
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED"]
    other.contribute()
    await server.settle()
    server.check_nobody_reads()
    assert server.engine.run.policy.version == 2


def test_no_more_shared_memory_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then weights go over the connection, to workers that offered a segment too, version after version."""

    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.share()
        for step in range(1, 10):
            worker.write_to_segment(step)
            await server.settle()
            assert worker.outcomes == ["START"] + ["APPLIED"] * step, f"stuck at step {step}"
            assert torch.equal(worker.weights(), torch.full((100_000,), -0.5 * step))
        server.check_nobody_reads()

    def refuse(num_bytes: int) -> Segment:
        raise SegmentError("none left")

    monkeypatch.setattr("paramserver.ps.tensors.model.new_segment", refuse)
    play()


@served(layout=LARGE, max_staged=2, workers=3, mode="async")
async def test_while_a_worker_reads_others_go_on(server: Server) -> None:
    """It reads one version all the time; the others' commits write elsewhere, in two memories by turns."""
    reader, *others = (Worker(server, rank) for rank in range(3))
    for worker in (reader, *others):
        await worker.share()
    reader.write_to_segment()
    await server.settle()
    weights = reader.weights().clone()
    for step in range(1, 6):
        for worker in others:
            worker.write_to_segment(step)
            await server.settle()
            worker.send(taken=pb.Taken())
            await turns()
    assert torch.equal(reader.weights(), weights), "what it reads has changed"
    assert not server.engine.model.publisher._free, "more than two memories"
    reader.task.cancel()
    await turns()
    server.check_nobody_reads()
    assert torch.equal(others[1].weights(), torch.full((100_000,), -0.5 * 11))


@served(layout=LARGE, max_staged=1, workers=2)
async def test_a_mean_stands_though_its_first_worker_is_gone(server: Server) -> None:
    """Its segment became the mean of the round: the server's mapping outlives the worker."""
    victim, other = Worker(server, 0), Worker(server, 1)
    await victim.share()
    await other.share()
    victim.write_to_segment(value=1.0)
    await server.settle()
    victim.segment = None
    victim.stream.close()
    victim.task.cancel()
    await turns()
    other.write_to_segment(value=3.0)
    await server.settle()
    assert torch.equal(other.weights(), torch.full((100_000,), -1.0))


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_rank_that_comes_back_without_a_segment_is_shown_without(server: Server) -> None:
    first = Worker(server, 0)
    await first.share()
    assert server.engine.traffic[0].transport == "shared memory"
    second = Worker(server, 0)
    await second.join()
    assert server.engine.traffic[0].transport == "grpc"
    second.contribute()
    await server.settle()
    assert not second.stream.received[-1].out_of_band
    assert torch.equal(second.weights(), torch.full((100_000,), -0.5))


def _spoil(address: pb.Segment, **changes: Any) -> pb.Segment:
    return pb.Segment(**{field.name: value for field, value in address.ListFields()} | changes)


@pytest.mark.parametrize(
    "changes", [{"pid": 1}, {"label": "0" * 32}, {"host": "another"}, {"num_bytes": 399_999}], ids=str
)
@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_an_offer_that_cannot_be_opened(server: Server, changes: dict[str, Any]) -> None:
    """The worker is told why, and takes part over the connection."""
    worker = Worker(server, 0)
    segment = new_segment(LARGE.exchange_bytes)
    assert segment.address is not None
    await worker.join(_spoil(segment.address, **changes))
    verdict = worker.stream.received[1]
    assert verdict.kind == "shared_memory"
    assert not verdict.header.accepted
    assert verdict.header.reason
    worker.contribute()
    await server.settle()
    assert worker.outcomes == ["START", "APPLIED"]
    assert server.engine.traffic[0].transport == "grpc"
    worker.announce(2, in_shared_memory=True)
    await turns()
    assert await worker.end() == "BAD_REQUEST"
    server.check_no_memory_is_kept()


@served(layout=LARGE, max_staged=1, workers=1, mode="async")
async def test_a_segment_larger_than_a_contribution_will_do(server: Server) -> None:
    """As the proto says: at least as large."""
    worker = Worker(server, 0)
    segment = new_segment(LARGE.exchange_bytes + 4096)
    segment.payload[: LARGE.exchange_bytes].view(torch.float32).fill_(1.0)
    await worker.join(segment.address)
    assert worker.stream.received[1].header.accepted, worker.stream.received[1].header.reason
    worker.announce(in_shared_memory=True)
    worker.send(out_of_band=LARGE.exchange_bytes)
    await server.settle()
    assert torch.equal(worker.weights(), torch.full((100_000,), -0.5))


@pytest.mark.parametrize("how", ["cancelled", "stream ends", "replaced", "killed while reading"])
def test_the_segment_of_a_worker_that_is_gone_is_let_go(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when the garbage collector comes by: it may be as large as the model."""

    opened: list[weakref.ref[Segment]] = []

    def open_and_note(address: pb.Segment) -> Segment:
        segment = open_segment(address)
        opened.append(weakref.ref(segment))
        return segment

    monkeypatch.setattr("paramserver.ps.wire.joining.open_segment", open_and_note)

    @served(layout=LARGE, max_staged=1, workers=1, mode="async")
    async def play(server: Server) -> None:
        worker = Worker(server, 0)
        await worker.share()
        worker.write_to_segment()
        await server.settle()
        if how != "killed while reading":
            worker.send(taken=pb.Taken())
            worker.announce(2, in_shared_memory=True)
            worker.send(out_of_band=4000)
            await turns()
        match how:
            case "stream ends":
                worker.stream.close()
            case "replaced":
                await Worker(server, 0).join()
            case _:
                worker.task.cancel()
        await server.settle()
        assert worker.task.done()
        server.calls.remove(worker.task)
        del worker
        await server.settle()
        assert opened[0]() is None
        server.check_nobody_reads()

    gc.disable()
    try:
        play()
    finally:
        gc.enable()
