"""Weights on their way to one worker: in the message itself, as frames, or in shared memory."""

from __future__ import annotations

from typing import Protocol

from ...common.wire.frames import INLINE_BYTES, body_frames, frame
from ...common.wire.segments import SegmentAddress
from ...proto import parameter_server_pb2 as pb
from ..core.run import Run
from .connected import Worker
from .stream import Stream


class Header(Protocol):
    """Makes the message that announces a body: its version, its size, and where it lies."""

    def __call__(self, version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage: ...


async def deliver(
    run: Run, stream: Stream, worker: Worker, header: Header, min_version: int, with_frozen: bool = False
) -> None:
    """Send the newest weights, at least of `min_version`; `with_frozen` also what never changes."""
    assert run.model.layout is not None
    num_bytes = run.model.layout.total_bytes if with_frozen else run.model.layout.exchange_bytes
    if run.model.layout.exchange_bytes <= INLINE_BYTES:
        version, body = run.model.small_body()
        await stream.write(frame(header(version, num_bytes, None), 0, [body]))
    elif worker.segment is not None and not with_frozen:
        await _place(run, stream, worker, header, min_version)
    else:
        await _send_frames(run, stream, header, min_version, num_bytes)
    if with_frozen:
        for raw in body_frames([run.model.frozen_bytes()], offset=run.model.layout.exchange_bytes):
            await stream.write(raw)


async def _place(run: Run, stream: Stream, worker: Worker, header: Header, min_version: int) -> None:
    """The weights' own memory is the body: the worker, on this host, is told what of it is made."""
    publication = await run.model.publisher.acquire(min_version, as_frames=False)
    worker.reading = publication
    address = publication.segment.address
    await stream.write(frame(header(publication.version, publication.num_bytes, address)))
    async for start, end in publication.progress():
        if address is not None:
            await stream.write_placed(start, end)
        else:  # no more shared memory could be had
            for raw in body_frames([publication.segment.bytes[start:end]], offset=start):
                await stream.write(raw)
    if address is None:
        taken(run, worker)  # it was told of no segment, and says nothing
    else:
        stream.lend()


async def _send_frames(run: Run, stream: Stream, header: Header, min_version: int, num_bytes: int) -> None:
    publication = await run.model.publisher.acquire(min_version, as_frames=True)
    try:
        await stream.write(frame(header(publication.version, num_bytes, None)))
        async for raw in publication.frames():
            await stream.write(raw)
    finally:
        run.model.publisher.release(publication, as_frames=True)


def taken(run: Run, worker: Worker) -> None:
    """The worker has read what it was told of, or is gone."""
    publication, worker.reading = worker.reading, None
    if publication is not None:
        run.model.publisher.release(publication, as_frames=False)
