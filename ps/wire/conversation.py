"""One worker's conversation with the run, from its first message to its last.

It is one coroutine, which reads and writes the stream in turn. When it ends, for any reason, the worker leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from ...common.errors import Reason, refusal, shown
from ...common.wire.checks import check_header
from ...common.wire.frames import INLINE_BYTES, parse
from ...common.wire.messages import read_topic
from ...common.wire.records import ResidualInfo
from ...proto import parameter_server_pb2 as pb
from ..core import effects, events
from ..engine.engine import Engine
from ..engine.folding import Done, Go, Item, Peer
from .connection import Connection
from .delivery import Delivery, Transport
from .joining import Joining
from .receiver import Receiver
from .stream import Stream, StreamLost

_MAX_REFUSAL = 2_000  # characters


@dataclass(eq=False)
class SmallExchanges:
    """Small contributions on a direct connection: the event loop's callback receives each one and sends its reply.

    Waking a task for a message and resolving a future for a reply would cost more than a small exchange itself. All
    other messages are left for the worker's conversation, which reads them from the connection. `_message` returns the
    message of an item, or None if it needs several.
    """

    _connection: Connection
    _stream: Stream
    _peer: Peer
    _receiver: Receiver
    _message: Callable[[Item], bytes | None]
    _is_due: bool = False  # the worker waits for a reply
    _is_paused: bool = False  # bytes arrived before the reply was sent

    async def until_other(self) -> bool:
        """Exchange until the conversation must take over. Returns True if it must send, and False if it must read."""
        loop = asyncio.get_running_loop()
        self._other: asyncio.Future[bool] = loop.create_future()
        self._is_due = self._is_paused = False
        self._peer.at_once = self._say
        self._connection.watch(self._readable)
        try:
            if self._connection.has_more:
                loop.call_soon(self._readable)
            return await self._other
        finally:
            self._peer.at_once = None
            self._connection.unwatch()

    def _readable(self) -> None:
        """Receive at most one contribution, so that other workers get their turn."""
        if self._other.done():
            return
        if self._is_due:
            self._is_paused = True
            self._connection.unwatch()
            return
        try:
            raw = self._connection.read_now()
            if raw is None:
                return
            received = parse(pb.WorkerMessage, raw)
            if received.header is not None:
                check_header(received.header)
            self._is_due = True
            self._stream.bytes_read += len(raw)  # before `take_now`, which moves the count to the worker's traffic
            if not self._receiver.take_now(received):
                self._stream.bytes_read -= len(raw)
                self._connection.unread(raw)
                self._end(False)
            elif not self._is_due and self._connection.has_more:
                asyncio.get_running_loop().call_soon(self._readable)
        except EOFError:
            self._end(False)
        except Exception as error:  # the conversation handles it
            self._fail(error)

    def _say(self, item: Item) -> bool:
        """Send an item of the run at once. Returns False if the conversation must send it."""
        if self._other.done():
            return False
        raw, is_reply = self._message(item), isinstance(item, Go)
        try:
            if raw is None or not self._stream.write_now(raw, is_counted=is_reply):
                self._end(True)
                return False
        except StreamLost as lost:
            self._fail(lost)
            return True
        if is_reply:
            self._is_due = False
            self._peer.traffic.num_received += self._stream.bytes_written
            self._stream.bytes_written = 0
            if self._is_paused:
                self._is_paused = False
                self._connection.watch(self._readable)
                asyncio.get_running_loop().call_soon(self._readable)
        return True

    def _end(self, has_to_say: bool) -> None:
        if not self._other.done():
            self._other.set_result(has_to_say)

    def _fail(self, error: Exception) -> None:
        if not self._other.done():
            self._other.set_exception(error)


class Conversation:
    """A worker's conversation on one stream. Await `run`, then call `close`."""

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self._engine, self._model, self._config, self._stream = engine, engine.model, engine.config, stream
        self._peer: Peer | None = None
        self._transport: Transport | None = None

    async def run(self, joining: Joining, context: grpc.aio.ServicerContext) -> None:
        """Let the worker join, exchange with it, and handle its goodbye."""
        stream, engine = self._stream, self._engine
        peer = self._peer = await joining.seat(stream, context)
        transport = self._transport = await joining.meet(stream, peer, context)
        delivery = Delivery(engine, stream, peer, transport)
        if not peer.is_resumed:
            await self._send_items(peer, delivery)
        leave = await self._exchange(peer, delivery, Receiver(engine, stream, peer, transport, joining.partials))
        if leave.finished:
            engine.offer(events.Finished(*peer.seat))
        how, why = ("failed", leave.failure) if leave.failure else ("goodbye", "said goodbye")
        exit_code = min(max(1, leave.exit_code), 255)
        engine.offer(events.Left(*peer.seat, how, why, dict(leave.final_metrics), exit_code))

    def close(self) -> None:
        """Detach the worker after its stream has ended, perhaps with a refusal."""
        peer, refused = self._peer, self._stream.refused
        if peer is None:
            return
        if self._transport is not None:
            self._transport.taken()
        self._engine.detach(peer)
        if refused is not None:
            self._engine.offer(events.Left(*peer.seat, "closed", shown(refused.message, _MAX_REFUSAL)))
        else:
            self._engine.offer(events.Disconnected(*peer.seat))
        # The call's traceback refers to these objects, and they to it. Break the cycle to free large memory at once.
        self._peer = self._transport = peer.weights = None
        peer.hang_up = lambda error: None

    async def _exchange(self, peer: Peer, delivery: Delivery, receiver: Receiver) -> pb.Leave:
        """Receive contributions and send replies. Returns the worker's goodbye."""
        model, stream = self._model, self._stream
        small: SmallExchanges | None = None
        is_small = model.has_weights and model.store.layout.exchange_bytes <= INLINE_BYTES
        if is_small and stream.direct is not None and self._config.limits.upload_bytes_per_s is None:
            small = SmallExchanges(stream.direct, stream, peer, receiver, delivery.whole)
        while True:
            if small is None or not await small.until_other():
                received = await receiver.next()
                if received.kind == "leave":
                    return received.of(pb.Leave)
                if received.kind == "finish":
                    break
            await self._send_items(peer, delivery)
        peer.state = "finished"
        facts = received.of(pb.Finish)
        residual = read_topic(ResidualInfo, facts.residual)
        self._engine.offer(events.Finished(*peer.seat, facts.transfer_s, facts.stays, residual))
        await self._send_items(peer, delivery)
        while (goodbye := await stream.read("leave", "taken")).kind == "taken":
            delivery.transport.taken()
        return goodbye.of(pb.Leave)

    async def _send_items(self, peer: Peer, delivery: Delivery) -> None:
        """Send the items of the worker's outbox until the worker may continue."""
        while True:
            match await peer.outbox.get():
                case str(reason):
                    await self._stream.say_waiting(reason)
                case effects.AskForWeights():
                    await self._take_weights(peer)
                case Go() as go:
                    return await delivery.reply(go)
                case Done() as done:
                    return await delivery.final(done)

    async def _take_weights(self, peer: Peer) -> None:
        await self._stream.say(pb.ServerMessage(send_weights=pb.SendWeights()))
        first = await self._stream.read_within(self._config.server.join_timeout_s, "initial_weights")
        model, layout = self._model, self._model.layout
        num_bytes = first.of(pb.InitialWeights).payload_bytes
        if num_bytes != layout.total_bytes:
            raise refusal(Reason.BAD_REQUEST, f"weights of {num_bytes} bytes; this model's have {layout.total_bytes}")
        try:
            weights = model.new_memory()
            await asyncio.to_thread(model.prepare_tables, self._config.run.seed)
        except (MemoryError, RuntimeError):  # of numpy and of torch
            problem = f"no memory for a model of {layout.total_bytes:,} bytes and its tables of rows"
            fix = "give the server more memory, or lower limits.model_bytes to the size that it can store"
            raise refusal(Reason.LIMIT_EXCEEDED, problem, fix=fix) from None
        await self._stream.read_payload(first, weights.bytes)
        model.check_finite(peer.rank, weights)
        peer.weights, peer.state = weights, "finished" if model.has_weights else "waiting"
        self._engine.offer(events.Brought(*peer.seat))
