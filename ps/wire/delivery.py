"""Weights on their way to one worker: in the message itself, as frames, or in shared memory."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from ...common.codecs.base import Codec
from ...common.tensors.layout import as_bytes, copy_of
from ...common.wire.frames import INLINE_BYTES, body_frames, frame, message_frames
from ...common.wire.segments import SegmentAddress
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..engine.peers import Done, Go, Peer
from ..tensors.publication import Publication
from .stream import Stream


class Header(Protocol):
    """Makes the message that announces a body: its version, its size, and where it lies."""

    def __call__(self, version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage: ...


async def deliver(engine: Engine, stream: Stream, peer: Peer, header: Header, item: Go | Done) -> None:
    """Send the weights that the item is about, or newer ones; with a START also what never changes."""
    model = engine.model
    assert model.layout is not None
    with_frozen = isinstance(item, Go) and item.answer.outcome == "START"
    num_bytes = model.layout.total_bytes if with_frozen else model.layout.exchange_bytes
    if peer.answer_codec is not None and isinstance(item, Go) and not with_frozen:
        await _send_encoded(engine, stream, peer, peer.answer_codec, header, item)
        return
    if model.layout.exchange_bytes <= INLINE_BYTES:
        version, body = (item.answer.version, item.body) if isinstance(item, Go) else (item.min_version, None)
        await stream.write(frame(header(version, num_bytes, None), 0, [body or model.small_body()]))
    else:
        as_frames = peer.segment is None or with_frozen
        held = item.held if isinstance(item, Go) else None
        version = item.answer.version if isinstance(item, Go) else item.min_version
        publication = held or await model.publisher.acquire(version, as_frames)
        if as_frames:
            await _send_frames(engine, stream, header, publication, num_bytes)
        else:
            await _place(engine, stream, peer, header, publication)
    if with_frozen:
        for raw in body_frames([model.frozen_bytes()], offset=model.layout.exchange_bytes):
            await stream.write(raw)


async def _send_encoded(engine: Engine, stream: Stream, peer: Peer, codec: Codec, header: Header, go: Go) -> None:
    """Weights as this worker's codec has them, which remembers what the worker has: nobody else's frames."""
    model, encode = engine.model, partial(engine.codec_memory(peer.rank).encode, codec)
    assert model.layout is not None
    if model.layout.exchange_bytes <= INLINE_BYTES:
        version, weights = go.answer.version, copy_of(memoryview(go.body or model.small_body()))
        encoded = await engine.tensors.run(partial(encode, weights))
    else:
        publication = go.held or await model.publisher.acquire(go.answer.version, as_frames=False)
        try:
            async for _ in publication.progress():
                pass
            version = publication.version
            encoded = await engine.tensors.run(partial(encode, publication.segment.body))
        finally:
            model.publisher.release(publication, as_frames=False)
    announced = header(version, len(encoded), None)
    announced.answer.codec = codec.name
    for raw in message_frames(announced, [as_bytes(encoded)]):
        await stream.write(raw)


async def _place(engine: Engine, stream: Stream, peer: Peer, header: Header, publication: Publication) -> None:
    """The weights' own memory is the body: the worker, on this host, is told what of it is made."""
    peer.reading = publication
    address = publication.segment.address
    await stream.write(frame(header(publication.version, publication.num_bytes, address)))
    async for start, end in publication.progress():
        if address is not None:
            await stream.write_placed(start, end)
        else:  # no more shared memory could be had
            for raw in body_frames([publication.segment.bytes[start:end]], offset=start):
                await stream.write(raw)
    if address is None:
        taken(engine, peer)  # it was told of no segment, and says nothing
    else:
        stream.lend()


async def _send_frames(
    engine: Engine, stream: Stream, header: Header, publication: Publication, num_bytes: int
) -> None:
    try:
        await stream.write(frame(header(publication.version, num_bytes, None)))
        async for raw in publication.frames():
            await stream.write(raw)
    finally:
        engine.model.publisher.release(publication, as_frames=True)


def taken(engine: Engine, peer: Peer) -> None:
    """The worker has read what it was told of, or is gone."""
    publication, peer.reading = peer.reading, None
    if publication is not None:
        engine.model.publisher.release(publication, as_frames=False)
