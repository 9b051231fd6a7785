"""Sends one worker its replies, with their weights, over any transport."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from functools import lru_cache, partial

from ...common.codecs.base import Codec
from ...common.tensors.layout import as_bytes, copy_of
from ...common.wire.frames import CHUNK_BYTES, INLINE_BYTES, frame, message_frames, payload_frames
from ...common.wire.messages import reply_message
from ...common.wire.records import ReferenceInfo, Reply, WeightsInfo
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..engine.folding import Done, Go, Item, Peer
from ..tensors.replies import Publication, ReferenceUpdate, encoded_weights
from .stream import Stream
from .transports import Transport, announce

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
