"""One worker's conversation with the run, from its first message to its goodbye: one coroutine, which reads and writes
its stream in turn. The end of it, for whatever reason, is the worker's leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc.aio

from ...common.codecs.base import Codec
from ...common.config.schema import Config
from ...common.errors import Reason, refusal
from ...common.tensors.layout import as_bytes, copy_of
from ...common.wire.frames import CHUNK_BYTES, INLINE_BYTES, Frame, body_frames, frame, message_frames
from ...proto import parameter_server_pb2 as pb
from ..core import effects, events
from ..engine.engine import Engine
from ..engine.peers import Done, Go, Item, Peer
from ..tensors.answers.reference import News
from .intake import Intake
from .joining import Joining
from .lanes.grpc import Header, Lane
from .small import SmallExchanges
from .stream import Stream


class Conversation:
    """On one stream. `hold` is its whole life; `over` must follow it."""

    def __init__(self, engine: Engine, config: Config, stream: Stream) -> None:
        self._engine = engine
        self._join_timeout_s = config.server.join_timeout_s
        self._stream = stream
        self._peer: Peer | None = None
        self._lane: Lane | None = None

    async def hold(self, joining: Joining, context: grpc.aio.ServicerContext) -> None:
        peer = self._peer = await joining.seat(self._stream, context)
        if peer is None:
            return
        delivery = Delivery(self._engine, self._stream, peer)
        lane = await joining.meet(self._stream, peer, delivery.lane, context)
        if lane is None:
            return
        self._lane = delivery.lane = lane
        if not peer.is_resumed and not await self._hear_out(peer, delivery):
            return
        goodbye = await self._exchange(peer, delivery, Intake(self._engine, self._stream, peer, lane))
        if goodbye is not None:
            self._leave(peer, goodbye.of(pb.Leave))

    def _leave(self, peer: Peer, said: pb.Leave) -> None:
        if said.finished:
            self._engine.offer(events.Finished(*peer.seat))
        how, why = ("failed", said.failure) if said.failure else ("goodbye", "said goodbye")
        exit_code = min(max(1, said.exit_code), 255)
        self._engine.offer(events.Left(*peer.seat, how, why, dict(said.metrics), exit_code))

    def over(self, refused: str) -> None:
        """The stream has ended, with a refusal unless `refused` is empty."""
        peer = self._peer
        if peer is None:
            return
        if self._lane is not None:
            self._lane.taken()
        self._engine.detach(peer)
        if refused:
            self._engine.offer(events.Left(*peer.seat, "closed", refused))
        else:
            self._engine.offer(events.Disconnected(*peer.seat))
        # The call's traceback and these hold each other: let go of what is large at once.
        self._peer = self._lane = peer.weights = None
        peer.hang_up = lambda error: None

    async def _exchange(self, peer: Peer, delivery: Delivery, intake: Intake) -> Frame | None:
        """Contributions and answers until the worker goes; its goodbye, or None when its stream ended instead."""
        model, connection = self._engine.model, self._stream.direct
        small: SmallExchanges | None = None
        if connection is not None and model.has_weights and model.store.layout.exchange_bytes <= INLINE_BYTES:
            small = SmallExchanges(connection, self._stream, peer, intake, delivery.whole)
        while True:
            if small is not None and await small.until_other():
                if not await self._hear_out(peer, delivery):
                    return None
                continue
            received = await intake.next()
            if received is None or received.kind == "leave":
                return received
            if received.kind == "finish":
                peer.state = "finished"
                facts = received.of(pb.Finish)
                self._engine.offer(events.Finished(*peer.seat, facts.transfer_s, facts.can_evaluate, facts.residual))
                if not await self._hear_out(peer, delivery):
                    return None
                while (goodbye := await self._stream.read("leave", "taken")) is not None and goodbye.kind == "taken":
                    delivery.lane.taken()
                return goodbye
            if not await self._hear_out(peer, delivery):
                return None

    async def _hear_out(self, peer: Peer, delivery: Delivery) -> bool:
        """Send what the run says until the worker may go on; False when its stream ended instead."""
        while True:
            match await peer.outbox.get():
                case str(reason):
                    await self._stream.say(pb.ServerMessage(waiting=pb.Waiting(reason=reason)))
                case effects.AskForWeights():
                    if not await self._take_initial_weights(peer):
                        return False
                case Go() as go:
                    await delivery.answer(go)
                    return True
                case Done() as done:
                    await delivery.final(done)
                    return True

    async def _take_initial_weights(self, peer: Peer) -> bool:
        await self._stream.say(pb.ServerMessage(send_weights=pb.SendWeights()))
        first = await self._stream.read_within(self._join_timeout_s, "initial_weights")
        if first is None:
            return False
        model = self._engine.model
        layout = model.layout
        assert layout is not None
        num_bytes = first.of(pb.InitialWeights).body_bytes
        if num_bytes != layout.total_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"initial weights of {num_bytes} bytes; this model's have {layout.total_bytes}",
            )
        try:
            weights = model.new_memory()
            await asyncio.to_thread(model.prepare_tables, self._engine.config.run.seed)
        except (MemoryError, RuntimeError):  # numpy's and torch's
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"no memory for a model of {layout.total_bytes:,} bytes and its tables of rows",
                fix="give the server more memory; limits.model_bytes is what it promises to take",
            ) from None
        if not await self._stream.read_body(first, weights.bytes):
            return False
        model.check_finite(peer.rank, weights)
        peer.weights, peer.state = weights, "waiting"
        self._engine.offer(events.Brought(*peer.seat))
        return True


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
    if segment is not None:
        answer.segment.CopyFrom(segment)
    if said.epoch:
        answer.bring, answer.bring_optimizer = said.brings, said.brings_optimizer
        answer.group.epoch, answer.group.meeting, answer.group.held = said.epoch, said.meeting, said.is_held
        answer.group.members.extend(said.group)
    return message


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
                found.answer.began.CopyFrom(pb.Place(**kept.place))
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
            await self._send_news(header, go.news)
        elif self._peer.answer_codec is not None and self._peer.encodes(said):
            await self._send_encoded(self._peer.answer_codec, header, go)
        else:
            await self._send(self.lane, header, said.version, go)
        traffic, stream = self._peer.traffic, self._stream
        traffic.num_received, stream.num_sent = traffic.num_received + stream.num_sent, 0

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
            await self._send_news(header, go.news, [frozen])
            return
        await self._send(self._frames, header, go.answer.version, go, len(frozen))
        for raw in body_frames([frozen], offset=model.store.layout.exchange_bytes):
            await self._stream.write(raw)

    async def _send(self, lane: Lane, header: Header, version: int, go: Go | None = None, more_bytes: int = 0) -> None:
        """The weights of `version`, or newer ones; `more_bytes` of the body follow."""
        model = self._engine.model
        num_bytes = model.store.layout.exchange_bytes
        if num_bytes <= INLINE_BYTES:
            body = go.body if go is not None else None
            await self._stream.write(
                frame(header(version, num_bytes + more_bytes, None), 0, [body or model.small_body()])
            )
            return
        held = go.held if go is not None else None
        publication = held or await model.publisher.acquire(version, lane.as_frames)
        is_next = go is not None and go.answer.outcome != "START" and self._peer.answer_codec is None
        lane.left_out = model.changes.kept(self._peer.base) if is_next and self._peer.base is not None else ()
        await lane.send(header, publication, num_bytes + more_bytes)

    async def _send_news(self, header: Header, news: News, more: Sequence[memoryview] = ()) -> None:
        """What leads to a reference, and `more` of the body behind it."""
        pieces = [*news.pieces, *more]
        announced = header(news.version, sum(map(len, pieces)), None)
        announced.answer.codec, announced.answer.reference = news.codec, news.number
        for left_out in news.left_out:
            announced.answer.left_out.add(tensors=self._engine.model.positions_of(left_out))
        if news.checked is not None and news.checked.check is not None:
            announced.answer.checked_reference, announced.answer.reference_crc = news.checked.number, news.checked.check
        for raw in message_frames(announced, pieces):
            await self._stream.write(raw)

    async def _send_encoded(self, codec: Codec, header: Header, go: Go) -> None:
        """As this worker's codec has them, which remembers what the worker has: nobody else's frames."""
        model, tensors = self._engine.model, self._engine.tensors
        memory = self._engine.folding.codec_memories.of(self._peer.rank)
        encode = partial(memory.encode, codec)
        if model.store.layout.exchange_bytes <= INLINE_BYTES:
            version, weights = go.answer.version, copy_of(memoryview(go.body or model.small_body()))
            encoded = await tensors.run(partial(encode, weights))
        else:
            publication = go.held or await model.publisher.acquire(go.answer.version, as_frames=False)
            try:
                async for _ in publication.progress():
                    pass
                version = publication.version
                encoded = await tensors.run(partial(encode, publication.segment.body))
            finally:
                model.publisher.release(publication, as_frames=False)
        announced = header(version, len(encoded), None)
        announced.answer.codec = codec.name
        for raw in message_frames(announced, [as_bytes(encoded)]):  # copies
            await self._stream.write(raw)
        memory.spares.give_back(encoded)
