"""What one worker is told: answers, and the weights that come with them, by whichever lane."""

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
    body_frames,
    frame,
    message_frames,
)
from ....proto import parameter_server_pb2 as pb
from ...core import effects
from ...engine.engine import Engine
from ...engine.peers import Done, Go, Item, Peer
from ...tensors.answers.publication import Publication
from ...tensors.answers.reference import News
from ..stream import Stream
from .grpc import Header, Lane

log = get_logger()

_KEY = secrets.token_bytes(32)  # of this process; never sent


_OUTCOMES: dict[str, Any] = {name: pb.Answer.Outcome.Value(name) for name in pb.Answer.Outcome.keys()}  # noqa: SIM118


def answer_message(
    said: effects.Answer, version: int, num_bytes: int, segment: pb.Segment | None = None
) -> pb.ServerMessage:
    """One message, made anew each time: setting its fields takes a third of building it from them."""
    message = pb.ServerMessage()
    answer = message.answer
    answer.outcome = _OUTCOMES[said.outcome]
    answer.step = said.number
    answer.version = version
    answer.next_local_steps = said.next_local_steps
    answer.body_bytes = num_bytes
    answer.staleness = said.staleness
    answer.held_s = said.held_s
    answer.reason = said.reason
    answer.num_workers = said.num_workers
    answer.worker_index = said.worker_index
    answer.training_steps = said.training_steps
    answer.steps = said.steps or 0
    answer.spare = said.has_spare
    answer.in_step = said.in_step
    if said.num_batches is not None:
        answer.batches = said.num_batches
    if said.rates is not None:
        answer.rates.MergeFrom(pb.Rates(**said.rates._asdict()))
    if said.twin is not None:
        answer.same_batches_as = said.twin
    if segment is not None:
        answer.segment.CopyFrom(segment)
    if said.epoch:
        answer.bring, answer.bring_optimizer = said.brings, said.brings_optimizer
        answer.group.epoch, answer.group.meeting, answer.group.held = said.epoch, said.meeting, said.is_held
        answer.group.members.extend(said.group)
        answer.group.secret = _secret_of(said.epoch, said.group, said.meeting)
    return message


@lru_cache(maxsize=16)
def _secret_of(*group: object) -> bytes:
    """What only members of this group know. Made here, and not by the run: history and snapshots have none of it."""
    return hmac.digest(_KEY, repr(group).encode(), "sha256")


class Delivery:
    """To one worker. A START goes over the stream, whatever the `lane`: it also has what never changes."""

    def __init__(self, engine: Engine, stream: Stream, peer: Peer) -> None:
        self._engine = engine
        self._stream = stream
        self._peer = peer
        self._frames = Lane(engine, stream)
        self.lane = self._frames

    def whole(self, item: Item) -> bytes | None:
        """What is one message; None for all else."""
        if isinstance(item, str):
            return pb.ServerMessage(waiting=pb.Waiting(reason=item)).SerializeToString()
        if not isinstance(item, Go):
            return None
        go, said, num_bytes = item, item.answer, self._engine.model.store.layout.exchange_bytes
        if said.outcome == "START" or (said.has_weights and (go.body is None or self._peer.encodes(said))):
            return None
        message = answer_message(said, said.version, num_bytes if said.has_weights else 0)
        return frame(message, 0, [go.body] if go.body is not None else [])

    async def answer(self, go: Go) -> None:
        said = go.answer
        kept = self._engine.states.at(self._peer.rank, said.number) if said.outcome == "START" else None

        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            found = answer_message(said, version, num_bytes, segment)
            if kept is not None:
                found.answer.began.CopyFrom(pb.Position(**kept.place))
            return found

        if (raw := self.whole(go)) is not None:
            await self._stream.write(raw)
        elif not said.has_weights:
            await self._stream.say(header(said.version, 0, None))
        elif said.outcome == "START":
            if kept is not None:
                await self._tell_state(kept.body)
            await self._start(header, go)
        elif go.news is not None:
            await self._send_news(header, go, go.news)
        elif self._peer.answer_codec is not None and self._peer.encodes(said):
            await self._send_encoded(self._peer.answer_codec, header, go)
        else:
            await self._send(self.lane, header, said.version, go)
        self._peer.traffic.received(*self._stream.take_sent())

    async def final(self, done: Done) -> None:
        def header(version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage:
            final = pb.Final(version=version, evaluate=done.evaluate, body_bytes=num_bytes, segment=segment)
            return pb.ServerMessage(final=final)

        await self._send(self.lane, header, done.min_version)

    async def _tell_state(self, body: bytes) -> None:
        for offset in range(0, len(body), CHUNK_BYTES):
            piece = pb.State(num_bytes=len(body), offset=offset, piece=body[offset : offset + CHUNK_BYTES])
            await self._stream.say(pb.ServerMessage(state=piece))

    async def _start(self, header: Header, go: Go) -> None:
        model = self._engine.model
        frozen = model.frozen_bytes()
        if go.news is not None:
            await self._send_news(header, go, go.news, [frozen])
            return
        await self._send(self._frames, header, go.answer.version, go, len(frozen))
        for raw in body_frames([frozen], offset=model.store.layout.exchange_bytes):
            await self._stream.write(raw)

    async def _send(self, lane: Lane, header: Header, version: int, go: Go | None = None, more_bytes: int = 0) -> None:
        """The weights of `version`, or newer ones; `more_bytes` of the body follow."""
        model, peer = self._engine.model, self._peer
        num_bytes = model.store.layout.exchange_bytes
        if num_bytes <= INLINE_BYTES:
            body = go.body if go is not None else None
            await self._stream.write(
                frame(header(version, num_bytes + more_bytes, None), 0, [body or model.small_body()])
            )
            return
        publication = await self._publication(lane.as_frames, version, go)
        is_next = go is not None and go.answer.outcome != "START" and peer.answer_codec is None
        lane.left_out = model.changes.kept(peer.base) if is_next and peer.base is not None else ()
        await lane.send(header, publication, num_bytes + more_bytes)

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
        """What leads to a reference, and `more` of the body behind it."""
        pieces = [*news.pieces, *more]
        num_bytes = sum(map(len, pieces))
        announced = header(news.version, num_bytes, None)
        announced.answer.codec, announced.answer.reference = news.codec, news.number
        for left_out in news.left_out:
            announced.answer.left_out.add(tensors=self._engine.model.positions_of(left_out))
        if news.checked is not None and news.checked.check is not None:
            announced.answer.checked_reference, announced.answer.reference_crc = news.checked.number, news.checked.check
        await self._write(announced, pieces)

    async def _send_encoded(self, codec: Codec, header: Header, go: Go) -> None:
        """As this worker's codec has them, which remembers what the worker has: nobody else's frames."""
        model, tensors = self._engine.model, self._engine.tensors
        memory = self._engine.folding.codec_memories.of(self._peer.rank)
        encode = partial(memory.encode, codec)
        if model.store.layout.exchange_bytes <= INLINE_BYTES:
            version, weights = go.answer.version, copy_of(memoryview(go.body or model.small_body()))
            encoded = await tensors.run(partial(encode, weights))
        else:
            publication = await self._publication(False, go.answer.version, go)
            try:
                async for _ in publication.progress():
                    pass
                version = publication.version
                encoded = await tensors.run(partial(encode, publication.segment.body))
            finally:
                model.publisher.release(publication, as_frames=False)
        announced = header(version, len(encoded), None)
        announced.answer.codec = codec.name
        await self._write(announced, [as_bytes(encoded)])
        memory.spares.give_back(encoded)
