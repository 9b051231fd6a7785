"""The lane that is always there: weights as frames on the stream, those of a version encoded once and shared by all."""

from __future__ import annotations

from functools import partial

from ....common.codecs.base import Codec
from ....common.tensors.layout import as_bytes, copy_of
from ....common.wire.frames import INLINE_BYTES, frame, message_frames
from ...engine.engine import Engine
from ...engine.peers import Go, Peer
from ...tensors.publication import Publication
from ..stream import Stream
from .base import Header


async def send_frames(engine: Engine, stream: Stream, header: Header, publication: Publication, num_bytes: int) -> None:
    """Everybody's frames, as they are made."""
    try:
        await stream.write(frame(header(publication.version, num_bytes, None)))
        async for raw in publication.frames():
            await stream.write(raw)
    finally:
        engine.model.publisher.release(publication, as_frames=True)


async def send_encoded(engine: Engine, stream: Stream, peer: Peer, codec: Codec, header: Header, go: Go) -> None:
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
