"""Sends one worker its replies, with their weights, over any transport."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from functools import lru_cache, partial

from ...common.codecs.base import Codec
from ...common.tensors.layout import as_bytes, copy_of
from ...common.wire.frames import CHUNK_BYTES, INLINE_BYTES, frame, message_frames, payload_frames
from ...common.wire.messages import reply_message, write_weights
from ...common.wire.records import ReferenceInfo, Reply, WeightsInfo
from ...proto import parameter_server_pb2 as pb
from ..engine.engine import Engine
from ..engine.peers import Done, Go, Item, Peer
from ..tensors.replies.publication import Publication
from ..tensors.replies.reference import ReferenceUpdate, encoded_weights
from .stream import Stream
from .transports import Header, Transport

_KEY = secrets.token_bytes(32)  # secret of this process, never sent


@lru_cache(maxsize=16)
def _secret_of(*group: object) -> bytes:
    """Return the secret of a group's members. The run does not know it, so history and snapshots never contain it."""
    return hmac.digest(_KEY, repr(group).encode(), "sha256")


class Delivery:
    """Sends replies to one worker. A START also has the frozen tensors, and always uses the stream's messages."""

    def __init__(self, engine: Engine, stream: Stream, peer: Peer) -> None:
        self._stream, self._peer, self._model = stream, peer, engine.model
        self._tensors, self._free_buffers, self._states = engine.tensors, engine.folding.free_buffers, engine.states
        self._frames = Transport(engine.model, stream)
        self.transport = self._frames
        self._retained: Publication | None = None  # of the reply that is being sent, until its weights are

    def whole(self, item: Item) -> bytes | None:
        """Return the message of an item that needs only one message, or None."""
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
            await self._reply(go)
        finally:
            if self._retained is not None:  # the stream was lost before the weights' turn
                self._model.publisher.release(self._retained, self._peer.as_frames(go.effect))

    async def _reply(self, go: Go) -> None:
        effect = go.effect
        version = effect.reply.result.version
        script = self._states.at(self._peer.rank, effect.reply.result.seq) if effect.is_start else None

        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            message = self._message(effect.reply)
            message.reply.result.version = version
            write_weights(WeightsInfo(num_bytes, segment=segment), message.reply.weights)
            if script is not None:
                message.reply.start.position.CopyFrom(pb.Position(**script.position))
            return message

        if (raw := self.whole(go)) is not None:
            await self._stream.write(raw)
        elif effect.is_start:
            state = script.payload if script is not None else b""
            for offset in range(0, len(state), CHUNK_BYTES):
                piece = pb.State(num_bytes=len(state), offset=offset, piece=state[offset : offset + CHUNK_BYTES])
                await self._stream.say(pb.ServerMessage(state=piece))
            frozen = as_bytes(self._model.store.weights)[self._model.store.layout.exchange_bytes :]
            if go.update is not None:
                await self._send_update(header, go.update, [frozen])
            else:
                await self._send(self._frames, header, version, go, len(frozen))
                for raw in payload_frames([frozen], offset=self._model.store.layout.exchange_bytes):
                    await self._stream.write(raw)
        elif go.update is not None:
            await self._send_update(header, go.update)
        elif self._peer.reply_codec is not None and self._peer.encodes(effect):
            await self._send_encoded(self._peer.reply_codec, header, go)
        else:
            await self._send(self.transport, header, version, go)
        self._peer.traffic.num_received += self._stream.pop_bytes_written()

    async def final(self, done: Done) -> None:
        """Send the run's final weights."""

        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            weights = pb.WeightsInfo(num_bytes=num_bytes, segment=segment)
            return pb.ServerMessage(final=pb.Final(version=version, evaluate=done.evaluate, weights=weights))

        await self._send(self.transport, header, done.min_version)

    async def _send(
        self, transport: Transport, header: Header, version: int, go: Go | None = None, more_bytes: int = 0
    ) -> None:
        """Send the weights of `version`, or newer weights. `more_bytes` of the same payload follow later."""
        model, base = self._model, self._peer.base
        num_bytes = model.store.layout.exchange_bytes
        if num_bytes <= INLINE_BYTES:
            payload = (go.payload if go is not None else None) or model.small_payload()
            await self._stream.write(frame(header(version, num_bytes + more_bytes, None), 0, [payload]))
            return
        publication = await self._publication(transport.as_frames, version)
        is_next = go is not None and not go.effect.is_start and self._peer.reply_codec is None
        transport.left_out = model.changes.kept(base) if is_next and base is not None else ()
        await transport.send(header, publication, num_bytes + more_bytes)

    async def _publication(self, as_frames: bool, version: int) -> Publication:
        """Return the publication to send. The caller releases it."""
        retained, self._retained = self._retained, None
        return retained or await self._model.publisher.acquire(version, as_frames)

    async def _write(self, header: pb.ServerMessage, pieces: Sequence[memoryview]) -> None:
        """Send a payload that only this worker gets. Each frame is a copy."""
        for raw in message_frames(header, list(pieces)):
            await self._stream.write(raw)

    # ---- encoded --------------------------------------------------------------------------------

    async def _send_update(self, header: Header, update: ReferenceUpdate, rest: Sequence[memoryview] = ()) -> None:
        """Send the differences that lead to a reference, or the whole reference, then `rest` of the payload."""
        pieces = [*update.pieces, *rest]
        num_bytes = sum(map(len, pieces))
        message = header(update.version, num_bytes, None)
        left_out = tuple(tuple(self._model.positions_of(tensors)) for tensors in update.left_out)
        checked, crc = (0, None) if update.checked is None else (update.checked.number, update.checked.check)
        reference = ReferenceInfo(update.number, 0 if crc is None else checked, crc or 0, left_out)
        write_weights(WeightsInfo(num_bytes, update.codec, reference=reference), message.reply.weights)
        await self._write(message, pieces)

    async def _send_encoded(self, codec: Codec, header: Header, go: Go) -> None:
        """Send the weights in the worker's codec."""
        model, tensors, version = self._model, self._tensors, go.effect.reply.result.version
        encode = partial(encoded_weights, codec, model.store.layout, self._free_buffers)
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
        message = header(version, len(encoded), None)
        message.reply.weights.codec = codec.name
        try:
            await self._write(message, [as_bytes(encoded)])
        finally:
            self._free_buffers.give_back(encoded)
