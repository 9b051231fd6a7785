"""Sends one worker its replies, with their weights, over any transport."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import lru_cache, partial
from typing import ClassVar

from ...common.codecs.base import Codec
from ...common.tensors.layout import as_bytes, copy_of
from ...common.wire.direct import OutOfBand, out_of_band_messages
from ...common.wire.frames import (
    CHUNK_BYTES,
    INLINE_BYTES,
    frame,
    left_out_frame,
    message_frames,
    out_of_band_frame,
    payload_frames,
)
from ...common.wire.messages import reply_message, write_weights
from ...common.wire.records import ReferenceInfo, Reply, WeightsInfo
from ...common.wire.segments import Segment
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..engine.folding import Done, Go, Item, Peer
from ..tensors.model import Model
from ..tensors.replies import Publication, Range, ReferenceUpdate, cut, encoded_weights
from .stream import Stream

_KEY = secrets.token_bytes(32)  # secret of this process, never sent


@lru_cache(maxsize=16)
def _secret_of(*group: object) -> bytes:
    """Return the secret of a group's members. The run does not know it, so history and snapshots never contain it."""
    return hmac.digest(_KEY, repr(group).encode(), "sha256")


class Delivery:
    """Sends replies to one worker. A START also has the frozen tensors, and always uses the stream's messages."""

    def __init__(self, engine: Engine, stream: Stream, peer: Peer, transport: Transport) -> None:
        self._stream, self._peer, self._model = stream, peer, engine.model
        self._tensors, self._folding = engine.tensors, engine.folding
        self.transport, self._frames = transport, Transport(engine.model, stream)
        self._retained: Publication | None = None  # of the reply that is being sent, until its weights are

    def whole(self, item: Item) -> bytes | None:
        """Return the message of an item that needs only one message, or None."""
        if isinstance(item, str):
            return pb.ServerMessage(waiting=pb.Waiting(reason=item)).SerializeToString()
        if not isinstance(item, Go):
            return None
        effect, payload, reply = item.effect, item.payload, item.effect.reply
        is_encoded = self._peer.reply_codec is not None and self._peer.encodes(effect)
        if reply.start is not None or (effect.has_weights and (payload is None or is_encoded)):
            return None
        message = self._message(reply)
        if payload is None:
            return frame(message)
        message.reply.weights.num_bytes = self._model.store.layout.exchange_bytes
        return frame(message, 0, [payload])

    def _message(self, reply: Reply) -> pb.ServerMessage:
        message = reply_message(reply)
        if (group := reply.group) is not None and group.generation:
            message.reply.group.secret = _secret_of(group.generation, group.members, group.rendezvous)
        return message

    async def reply(self, go: Go) -> None:
        """Send the reply of an item, with its weights. The version that was retained for it is released."""
        self._retained = go.publication
        try:
            if (raw := self.whole(go)) is not None:
                await self._stream.write(raw)
            else:
                await self._reply(go)
            self._peer.traffic.num_received += self._stream.bytes_written
            self._stream.bytes_written = 0
        finally:
            if self._retained is not None:  # the stream was lost before the weights' turn
                self._model.publisher.release(self._retained, self._peer.as_frames(go.effect))

    async def _reply(self, go: Go) -> None:
        effect, codec, store = go.effect, self._peer.reply_codec, self._model.store
        message = self._message(effect.reply)
        frozen: list[memoryview] = []  # the bytes of the frozen tensors
        if effect.is_start:
            frozen = [as_bytes(store.weights)[store.layout.exchange_bytes :]]
            script = self._folding.states.at(self._peer.rank, effect.reply.result.seq)
            if script is not None:
                message.reply.start.position.CopyFrom(pb.Position(**script.position))
                state = script.payload
                for offset in range(0, len(state), CHUNK_BYTES):
                    piece = pb.State(num_bytes=len(state), offset=offset, piece=state[offset : offset + CHUNK_BYTES])
                    await self._stream.say(pb.ServerMessage(state=piece))
        if go.update is not None:
            await self._send_update(message, go.update, frozen)
        elif not effect.is_start and codec is not None and self._peer.encodes(effect):
            await self._send_encoded(message, go, codec)
        else:
            transport = self._frames if effect.is_start else self.transport
            await self._send(transport, message, effect.reply.result.version, go, sum(map(len, frozen)))
            for raw in payload_frames(frozen, offset=store.layout.exchange_bytes):
                await self._stream.write(raw)

    async def final(self, done: Done) -> None:
        """Send the run's final weights."""
        await self._send(self.transport, pb.ServerMessage(final=pb.Final(is_asked=done.is_asked)), done.min_version)

    async def _send(
        self, transport: Transport, message: pb.ServerMessage, version: int, go: Go | None = None, more_bytes: int = 0
    ) -> None:
        """Send the weights of `version`, or newer weights. `more_bytes` of the same payload follow later."""
        model, base = self._model, self._peer.base
        num_bytes = model.store.layout.exchange_bytes
        if num_bytes <= INLINE_BYTES:
            payload = (go.payload if go is not None else None) or model.small_payload()
            announce(message, version, WeightsInfo(num_bytes + more_bytes))
            await self._stream.write(frame(message, 0, [payload]))
            return
        publication = await self._publication(transport.as_frames, version)
        is_next = go is not None and not go.effect.is_start and self._peer.reply_codec is None
        transport.left_out = model.changes.kept(base) if is_next and base is not None else ()
        await transport.send(message, publication, num_bytes + more_bytes)

    async def _publication(self, as_frames: bool, version: int) -> Publication:
        """Return the publication to send. The caller releases it."""
        retained, self._retained = self._retained, None
        return retained or await self._model.publisher.acquire(version, as_frames)

    # ---- encoded --------------------------------------------------------------------------------

    async def _send_update(
        self, message: pb.ServerMessage, update: ReferenceUpdate, frozen: Sequence[memoryview]
    ) -> None:
        """Send the differences that lead to a reference, or the whole reference, then the frozen tensors."""
        pieces = [*update.pieces, *frozen]
        left_out = tuple(tuple(self._model.positions_of(tensors)) for tensors in update.left_out)
        checked, crc = (0, None) if update.checked is None else (update.checked.number, update.checked.check)
        reference = ReferenceInfo(update.number, 0 if crc is None else checked, crc or 0, left_out)
        weights = WeightsInfo(sum(map(len, pieces)), update.codec, reference=reference)
        for raw in message_frames(announce(message, update.version, weights), pieces):
            await self._stream.write(raw)

    async def _send_encoded(self, message: pb.ServerMessage, go: Go, codec: Codec) -> None:
        """Send the weights in the worker's codec."""
        model, tensors, version = self._model, self._tensors, go.effect.reply.result.version
        encode = partial(encoded_weights, codec, model.store.layout, self._folding.free_buffers)
        if model.store.layout.exchange_bytes <= INLINE_BYTES:
            encoded = await tensors.run(partial(encode, copy_of(memoryview(go.payload or model.small_payload()))))
        else:
            publication = await self._publication(False, version)
            try:
                async for _ in publication.progress():
                    pass
                version = publication.version
                encoded = await tensors.run(partial(encode, publication.segment.payload))
            finally:
                model.publisher.release(publication, as_frames=False)
        try:
            announce(message, version, WeightsInfo(len(encoded), codec.name))
            for raw in message_frames(message, [as_bytes(encoded)]):
                await self._stream.write(raw)
        finally:
            self._folding.free_buffers.give_back(encoded)


# ---- transports -----------------------------------------------------------------------------------
# Transports of payloads from and to one worker, for the time of one stream.
#
# Payloads travel in the stream's messages, behind the messages of a direct connection, or in memory that both
# processes map. A contribution outside of messages has `in_shared_memory`, and each of its pieces is a message with
# `out_of_band`.


def announce(message: pb.ServerMessage, version: int, weights: WeightsInfo) -> pb.ServerMessage:
    """Write into a Reply or Final which weights follow it, and return it."""
    if message.HasField("final"):
        message.final.version = version
        write_weights(weights, message.final.weights)
    else:
        message.reply.result.version = version
        write_weights(weights, message.reply.weights)
    return message


class Transport:
    """Sends payloads in the stream's messages. All workers share the frames of a version."""

    name: ClassVar[str] = "grpc"  # as logs and the summary show it
    # All payloads are frames. False: raw contributions may be out of band, and replies read the weights' own memory.
    as_frames: ClassVar[bool] = True

    def __init__(self, model: Model, stream: Stream, segment: Segment | None = None) -> None:
        self.model, self.stream = model, stream
        self.segment = segment  # the worker's shared memory, for contributions
        self.reading: Publication | None = None  # is being sent; in shared memory, until the worker sends Taken
        self.left_out: Sequence[Range] = ()  # bytes of the next weights that the worker already has

    async def send(self, message: pb.ServerMessage, publication: Publication, num_bytes: int) -> None:
        """Send a Reply or Final with the weights of one publication, as they are finished, and release it.

        In shared memory, the publication is released once the worker has read it and sends Taken.
        """
        self.reading = publication
        address = publication.segment.address if self.segment is not None else None
        try:
            await self.stream.say(announce(message, publication.version, WeightsInfo(num_bytes, segment=address)))
            async for piece in self._messages(publication):
                await self.stream.write(piece)
            if address is None:
                await self.stream.flush()
            else:
                self.stream.expect_taken()
        finally:
            if address is None:
                self.taken()

    def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        """Yield the messages of a payload as soon as its weights are finished."""
        return publication.frames(self.left_out)

    def taken(self) -> None:
        """Release the weights, because they are sent, or the worker has read them or is gone."""
        publication, self.reading = self.reading, None
        if publication is not None:
            self.model.publisher.release(publication, self.as_frames)


class DirectTransport(Transport):
    """Sends raw payloads behind their messages, on the direct connection that carries all messages."""

    name = "direct"
    as_frames = False

    async def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        async for made in publication.progress():
            for start, end, is_left_out in cut(*made, self.left_out):
                if is_left_out:
                    yield left_out_frame(start, end - start)
                else:
                    for message in self._pieces(publication, start, end):
                        yield message

    def _pieces(self, publication: Publication, start: int, end: int) -> Iterable[bytes | OutOfBand]:
        """Return the messages of these bytes."""
        return out_of_band_messages([publication.segment.bytes[start:end]], start)


class SharedTransport(DirectTransport):
    """Uses shared memory: the worker's `segment` for contributions, and the weights' own memory for replies.

    A reply announces the bytes of the weights as they are finished, and the worker sends Taken once it has read them.
    """

    name = "shared memory"

    def _pieces(self, publication: Publication, start: int, end: int) -> Iterable[bytes | OutOfBand]:
        if publication.segment.address is None:  # there was no shared memory for this version
            return payload_frames([publication.segment.bytes[start:end]], offset=start)
        self.stream.bytes_written += end - start
        return [out_of_band_frame(start, end - start)]
