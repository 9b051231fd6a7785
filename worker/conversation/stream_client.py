"""One stream to a server process: sends and receives frames, synchronously."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import grpc

from ...common.errors import ParamServerError
from ...common.wire.direct import OutOfBand
from ...common.wire.frames import Frame, parse
from ...proto import parameter_server_pb2 as pb
from ..ownership import at_exit, not_at_exit
from ..transports.limit import Limit
from .channel import Channel, Lost, next_frame
from .direct import DirectConnection, DirectError
from .messages import message
from .threads import uninterrupted

_ATTEMPT_S = 2.0  # for one attempt to connect
_GOODBYE_S = 5.0
_STATUS_S = 2.0  # time in which a stream reports why it ended


class StreamClient:
    """One Exchange stream at a time on a channel, with a direct connection beside it if both sides support it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outgoing: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._connected: DirectConnection | None = None
        self.direct: DirectConnection | None = None  # the same, once messages use it
        self._call: Any = None
        self._is_reading = False
        at_exit(self.close_stream)  # runs before the channel is closed

    def open(self) -> None:
        """Connect and start a stream. Raises as `Channel.connect`."""
        self.close_stream()
        channel, self._outgoing = self._channel, queue.SimpleQueue()
        channel.connect(_ATTEMPT_S)
        exchange = channel.method("stream_stream", "Exchange")
        self._call = exchange(_drain(self._outgoing, channel.limit), metadata=channel.credentials.metadata)
        self._is_reading = False

    def go_direct(self, welcome: pb.Welcome) -> str:
        """Make the direct connection that the Welcome offers. Returns why that failed, or an empty string.

        Messages use the connection from `offer` on.
        """
        if not welcome.HasField("direct"):
            return "the server has no direct port"
        channel, offer = self._channel, welcome.direct
        try:
            direct = self._connected = DirectConnection(
                channel.address, offer.port, offer.ticket, channel.credentials, channel.limit
            )
        except DirectError as error:
            return str(error)
        self._call.add_callback(direct.hang_up)
        return ""

    def offer(self, model: pb.Model) -> None:
        """Send the model. With a direct connection it is the last message on the stream."""
        model.direct = self._connected is not None
        self.say(model=model)
        self.direct = self._connected

    def send(self, frames: Iterable[bytes | OutOfBand]) -> None:
        """Queue messages. A generator is consumed only as fast as the connection takes the messages."""
        if self.direct is not None:
            self.direct.send(frames)
        else:
            self._outgoing.put(frames)  # type: ignore[arg-type]  # OutOfBand needs a direct connection

    def say(self, **kind: Any) -> None:
        """Queue one small message, such as `say(leave={...})` with the fields of Leave."""
        self.send(message(**kind))

    def receive(self) -> Frame:
        """Receive the next message. Raises Lost, or the refusal that ended the stream."""
        self._is_reading = True
        with uninterrupted:
            if self.direct is None:
                try:
                    received = next_frame(self._call, self._channel.limit)
                except Lost as lost:
                    self._channel.wait_longer(lost)
                    raise
            else:
                try:
                    received = parse(pb.ServerMessage, self.direct.receive())
                except (OSError, EOFError, ValueError) as error:
                    raise self._why_lost(error) from None
            self._is_reading = False
        return received

    def _why_lost(self, error: Exception) -> Exception:
        """The error for a lost direct connection, with the reason from the stream."""
        call = self._call
        if call is None:
            return Lost("the connection was closed")
        hang_up = threading.Timer(_STATUS_S, call.cancel)
        hang_up.start()
        try:
            next_frame(call)
        except (Lost, ParamServerError) as known:
            if isinstance(known, ParamServerError) or hang_up.is_alive():
                return known
        finally:
            hang_up.cancel()
        return Lost(f"the direct connection was lost: {error or 'closed'}")

    def receive_into(self, targets: Iterator[memoryview]) -> None:
        """Receive the bytes that follow a message on the direct connection. Raises as `receive`."""
        assert self.direct is not None
        try:
            with uninterrupted:
                self.direct.receive_into(targets)
        except (OSError, EOFError, ValueError) as error:
            raise self._why_lost(error) from None

    def end_stream(self) -> None:
        """Half-close after pending messages, and wait for the server to end the stream. Ignores a lost server."""
        if self._call is None:
            return
        self._outgoing.put(None)
        if self.direct is not None:
            self.direct.half_close()
        if not self._is_reading:  # else interrupted in the middle of an operation: the call is unusable
            hang_up = threading.Timer(_GOODBYE_S, self._call.cancel)
            hang_up.start()
            with suppress(grpc.RpcError):
                for _ in self._call:
                    pass  # a Waiting message that was in flight
            hang_up.cancel()
        self.close_stream()

    def hang_up(self) -> None:
        """End the stream from any thread. A reader then raises Lost."""
        if (call := self._call) is not None:
            call.cancel()
        if (connected := self._connected) is not None:
            connected.hang_up()

    def close(self) -> None:
        """End the stream and its channel."""
        not_at_exit(self.close_stream)
        self.close_stream()
        self._channel.close()

    def close_stream(self) -> None:
        """End the stream at once. The server sees that the worker left."""
        if self._call is not None:
            self._outgoing.put(None)
            self._call.cancel()
            self._call = None
        connected, self._connected, self.direct = self._connected, None, None
        if connected is not None:
            connected.close()


def _drain(outgoing: queue.SimpleQueue[Iterable[bytes] | None], limit: Limit) -> Iterator[bytes]:
    while (frames := outgoing.get()) is not None:
        for raw in frames:
            yield raw
            if limit.at_once:
                limit.passed("up", len(raw))
