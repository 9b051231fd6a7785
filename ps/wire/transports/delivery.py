"""What one worker is told: replies, and the weights that come with them, by whichever transport."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from functools import lru_cache, partial

from ....common.codecs.base import Codec
from ....common.reporting.log import get_logger
from ....common.tensors.layout import as_bytes, copy_of
from ....common.wire.frames import (
    CHUNK_BYTES,
    INLINE_BYTES,
    frame,
    message_frames,
    payload_frames,
)
from ....common.wire.messages import reply_message, write_weights
from ....common.wire.records import ReferenceInfo, Reply, WeightsInfo
from ....proto import parameter_server_pb2 as pb
from ...engine.engine import Engine
from ...engine.peers import Done, Go, Item, Peer
from ...tensors.replies.publication import Publication
from ...tensors.replies.reference import News
from ..stream import Stream
from .grpc import Header, Transport

log = get_logger()

_KEY = secrets.token_bytes(32)  # of this process; never sent


@lru_cache(maxsize=16)
def _secret_of(*group: object) -> bytes:
    """What only members of this group know. Made here, and not by the run: history and snapshots have none of it."""
    return hmac.digest(_KEY, repr(group).encode(), "sha256")


class Delivery:
    """To one worker. A START goes over the stream, whatever the `transport`: it also has what never changes."""

    def __init__(self, engine: Engine, stream: Stream, peer: Peer) -> None:
        self._engine = engine
        self._stream = stream
        self._peer = peer
        self._frames = Transport(engine, stream)
        self.transport = self._frames

    def whole(self, item: Item) -> bytes | None:
        """What is one message; None for all else."""
        if isinstance(item, str):
            return pb.ServerMessage(waiting=pb.Waiting(reason=item)).SerializeToString()
        if not isinstance(item, Go):
            return None
        effect, payload = item.effect, item.payload
        if effect.is_start or (effect.has_weights and (payload is None or self._peer.encodes(effect))):
            return None
        message = self._message(effect.reply)
        if payload is None:
            return frame(message)
        message.reply.weights.num_bytes = self._engine.model.store.layout.exchange_bytes
        return frame(message, 0, [payload])

    def _message(self, reply: Reply) -> pb.ServerMessage:
        message = reply_message(reply)
        if (group := reply.group) is not None and group.generation:
            message.reply.group.secret = _secret_of(group.generation, group.members, group.rendezvous)
        return message

    async def reply(self, go: Go) -> None:
        effect, result = go.effect, go.effect.reply.result
        kept = self._engine.states.at(self._peer.rank, result.seq) if effect.is_start else None

        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            found = self._message(effect.reply)
            found.reply.result.version = version
            write_weights(WeightsInfo(num_bytes, segment=segment), found.reply.weights)
            if kept is not None:
                found.reply.start.position.CopyFrom(pb.Position(**kept.place))
            return found

        if (raw := self.whole(go)) is not None:
            await self._stream.write(raw)
        elif effect.is_start:
            if kept is not None:
                await self._tell_state(kept.payload)
            await self._start(header, go)
        elif go.news is not None:
            await self._send_news(header, go, go.news)
        elif self._peer.reply_codec is not None and self._peer.encodes(effect):
            await self._send_encoded(self._peer.reply_codec, header, go)
        else:
            await self._send(self.transport, header, result.version, go)
        self._peer.traffic.received(*self._stream.take_sent())

    async def final(self, done: Done) -> None:
        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            weights = pb.WeightsInfo(num_bytes=num_bytes, segment=segment)
            return pb.ServerMessage(final=pb.Final(version=version, evaluate=done.evaluate, weights=weights))

        await self._send(self.transport, header, done.min_version)

    async def _tell_state(self, payload: bytes) -> None:
        for offset in range(0, len(payload), CHUNK_BYTES):
            piece = pb.State(num_bytes=len(payload), offset=offset, piece=payload[offset : offset + CHUNK_BYTES])
            await self._stream.say(pb.ServerMessage(state=piece))

    async def _start(self, header: Header, go: Go) -> None:
        model = self._engine.model
        frozen = model.frozen_bytes()
        if go.news is not None:
            await self._send_news(header, go, go.news, [frozen])
            return
        await self._send(self._frames, header, go.effect.reply.result.version, go, len(frozen))
        for raw in payload_frames([frozen], offset=model.store.layout.exchange_bytes):
            await self._stream.write(raw)

    async def _send(
        self, transport: Transport, header: Header, version: int, go: Go | None = None, more_bytes: int = 0
    ) -> None:
        """The weights of `version`, or newer ones; `more_bytes` of the payload follow."""
        model, peer = self._engine.model, self._peer
        num_bytes = model.store.layout.exchange_bytes
        if num_bytes <= INLINE_BYTES:
            payload = go.payload if go is not None else None
            await self._stream.write(
                frame(header(version, num_bytes + more_bytes, None), 0, [payload or model.small_payload()])
            )
            return
        publication = await self._publication(transport.as_frames, version, go)
        is_next = go is not None and not go.effect.is_start and peer.reply_codec is None
        transport.left_out = model.changes.kept(peer.base) if is_next and peer.base is not None else ()
        await transport.send(header, publication, num_bytes + more_bytes)

    async def _publication(self, as_frames: bool, version: int, go: Go | None) -> Publication:
        """The version that is to be sent, to be given back to the publisher."""
        held = go.held if go is not None else None
        return held or await self._engine.model.publisher.acquire(version, as_frames)

    async def _write(self, announced: pb.ServerMessage, pieces: Sequence[memoryview]) -> None:
        """A payload of this worker's alone; copies each frame."""
        for raw in message_frames(announced, list(pieces)):
            await self._stream.write(raw)

    # ---- encoded --------------------------------------------------------------------------------

    async def _send_news(self, header: Header, go: Go, news: News, more: Sequence[memoryview] = ()) -> None:
        """What leads to a reference, and `more` of the payload behind it."""
        pieces = [*news.pieces, *more]
        num_bytes = sum(map(len, pieces))
        announced = header(news.version, num_bytes, None)
        left_out = tuple(tuple(self._engine.model.positions_of(tensors)) for tensors in news.left_out)
        checked, crc = (0, None) if news.checked is None else (news.checked.number, news.checked.check)
        reference = ReferenceInfo(news.number, 0 if crc is None else checked, crc or 0, left_out)
        write_weights(WeightsInfo(num_bytes, news.codec, reference=reference), announced.reply.weights)
        await self._write(announced, pieces)

    async def _send_encoded(self, codec: Codec, header: Header, go: Go) -> None:
        """As this worker's codec has them, which remembers what the worker has: nobody else's frames."""
        model, tensors = self._engine.model, self._engine.tensors
        memory = self._engine.folding.codec_memories.of(self._peer.rank)
        encode = partial(memory.encode, codec)
        if model.store.layout.exchange_bytes <= INLINE_BYTES:
            version, weights = go.effect.reply.result.version, copy_of(memoryview(go.payload or model.small_payload()))
            encoded = await tensors.run(partial(encode, weights))
        else:
            publication = await self._publication(False, go.effect.reply.result.version, go)
            try:
                async for _ in publication.progress():
                    pass
                version = publication.version
                encoded = await tensors.run(partial(encode, publication.segment.payload))
            finally:
                model.publisher.release(publication, as_frames=False)
        announced = header(version, len(encoded), None)
        announced.reply.weights.codec = codec.name
        await self._write(announced, [as_bytes(encoded)])
        memory.free_buffers.give_back(encoded)
