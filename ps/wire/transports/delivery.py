"""What one worker is told: replies, and the weights that come with them, by whichever transport."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

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
from ....proto import parameter_server_pb2 as pb
from ...core import effects
from ...engine.engine import Engine
from ...engine.peers import Done, Go, Item, Peer
from ...tensors.replies.publication import Publication
from ...tensors.replies.reference import News
from ..stream import Stream
from .grpc import Header, Transport

log = get_logger()

_KEY = secrets.token_bytes(32)  # of this process; never sent


_OUTCOMES: dict[str, Any] = {name: pb.Reply.Outcome.Value(name) for name in pb.Reply.Outcome.keys()}  # noqa: SIM118


def reply_message(
    said: effects.Reply, version: int, num_bytes: int, segment: pb.Segment | None = None
) -> pb.ServerMessage:
    """One message, made anew each time: setting its fields takes a third of building it from them."""
    message = pb.ServerMessage()
    reply = message.reply
    reply.outcome = _OUTCOMES[said.outcome]
    reply.step = said.number
    reply.version = version
    reply.next_local_steps = said.next_local_steps
    reply.payload_bytes = num_bytes
    reply.staleness = said.staleness
    reply.gate_wait_s = said.gate_wait_s
    reply.reason = said.reason
    reply.num_workers = said.num_workers
    reply.worker_index = said.worker_index
    reply.training_steps = said.training_steps
    reply.steps = said.steps or 0
    reply.evaluator = said.has_evaluator
    reply.in_step = said.in_step
    if said.num_batches is not None:
        reply.batches = said.num_batches
    if said.rates is not None:
        reply.rates.MergeFrom(pb.Rates(**said.rates._asdict()))
    if said.twin is not None:
        reply.same_batches_as = said.twin
    if segment is not None:
        reply.segment.CopyFrom(segment)
    if said.generation:
        reply.bring, reply.upload_optimizer = said.brings, said.uploads_optimizer
        reply.group.generation, reply.group.rendezvous, reply.group.held = (
            said.generation,
            said.rendezvous,
            said.is_held,
        )
        reply.group.members.extend(said.group)
        reply.group.secret = _secret_of(said.generation, said.group, said.rendezvous)
    return message


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
        go, said, num_bytes = item, item.reply, self._engine.model.store.layout.exchange_bytes
        if said.outcome == "START" or (said.has_weights and (go.payload is None or self._peer.encodes(said))):
            return None
        message = reply_message(said, said.version, num_bytes if said.has_weights else 0)
        return frame(message, 0, [go.payload] if go.payload is not None else [])

    async def reply(self, go: Go) -> None:
        said = go.reply
        kept = self._engine.states.at(self._peer.rank, said.number) if said.outcome == "START" else None

        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            found = reply_message(said, version, num_bytes, segment)
            if kept is not None:
                found.reply.began.CopyFrom(pb.Position(**kept.place))
            return found

        if (raw := self.whole(go)) is not None:
            await self._stream.write(raw)
        elif not said.has_weights:
            await self._stream.say(header(said.version, 0, None))
        elif said.outcome == "START":
            if kept is not None:
                await self._tell_state(kept.payload)
            await self._start(header, go)
        elif go.news is not None:
            await self._send_news(header, go, go.news)
        elif self._peer.reply_codec is not None and self._peer.encodes(said):
            await self._send_encoded(self._peer.reply_codec, header, go)
        else:
            await self._send(self.transport, header, said.version, go)
        self._peer.traffic.received(*self._stream.take_sent())

    async def final(self, done: Done) -> None:
        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            final = pb.Final(version=version, evaluate=done.evaluate, payload_bytes=num_bytes, segment=segment)
            return pb.ServerMessage(final=final)

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
        await self._send(self._frames, header, go.reply.version, go, len(frozen))
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
        is_next = go is not None and go.reply.outcome != "START" and peer.reply_codec is None
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
        announced.reply.codec, announced.reply.reference = news.codec, news.number
        for left_out in news.left_out:
            announced.reply.left_out.add(tensors=self._engine.model.positions_of(left_out))
        if news.checked is not None and news.checked.check is not None:
            announced.reply.checked_reference, announced.reply.reference_crc = news.checked.number, news.checked.check
        await self._write(announced, pieces)

    async def _send_encoded(self, codec: Codec, header: Header, go: Go) -> None:
        """As this worker's codec has them, which remembers what the worker has: nobody else's frames."""
        model, tensors = self._engine.model, self._engine.tensors
        memory = self._engine.folding.codec_memories.of(self._peer.rank)
        encode = partial(memory.encode, codec)
        if model.store.layout.exchange_bytes <= INLINE_BYTES:
            version, weights = go.reply.version, copy_of(memoryview(go.payload or model.small_payload()))
            encoded = await tensors.run(partial(encode, weights))
        else:
            publication = await self._publication(False, go.reply.version, go)
            try:
                async for _ in publication.progress():
                    pass
                version = publication.version
                encoded = await tensors.run(partial(encode, publication.segment.payload))
            finally:
                model.publisher.release(publication, as_frames=False)
        announced = header(version, len(encoded), None)
        announced.reply.codec = codec.name
        await self._write(announced, [as_bytes(encoded)])
        memory.free_buffers.give_back(encoded)
