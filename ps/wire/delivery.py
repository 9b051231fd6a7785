"""Weights on their way to one worker: in the message itself, as frames, or in shared memory."""

from __future__ import annotations

from ...common.wire.frames import INLINE_BYTES, body_frames, frame
from ..engine.engine import Engine
from ..engine.peers import Done, Go, Peer
from .lanes.base import Header
from .lanes.grpc import send_encoded, send_frames
from .lanes.shared import place
from .stream import Stream


async def deliver(engine: Engine, stream: Stream, peer: Peer, header: Header, item: Go | Done) -> None:
    """Send the weights that the item is about, or newer ones; with a START also what never changes."""
    model = engine.model
    assert model.layout is not None
    with_frozen = isinstance(item, Go) and item.answer.outcome == "START"
    num_bytes = model.layout.total_bytes if with_frozen else model.layout.exchange_bytes
    if peer.answer_codec is not None and isinstance(item, Go) and not with_frozen:
        await send_encoded(engine, stream, peer, peer.answer_codec, header, item)
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
            await send_frames(engine, stream, header, publication, num_bytes)
        else:
            await place(engine, stream, peer, header, publication)
    if with_frozen:
        for raw in body_frames([model.frozen_bytes()], offset=model.layout.exchange_bytes):
            await stream.write(raw)
