"""One stream to a server process: sends and receives frames, synchronously; and the direct connection beside it."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import grpc

from ...common.config.addresses import join_address, split_address
from ...common.errors import ParamServerError
from ...common.proxies import proxy_of
from ...common.security import Credentials, client_context
from ...common.wire.direct import (
    ACCEPTED,
    BUFFER_BYTES,
    HELLO,
    WAITS,
    DirectSocket,
    OutOfBand,
    Pieces,
    set_socket_options,
    to_buffers,
)
from ...common.wire.frames import INLINE_BYTES, Frame, parse, stretches
from ...proto import parameter_server_pb2 as pb
from ..ownership import at_exit, not_at_exit
from ..transports.limit import NO_LIMIT, Limit
from .channel import Channel, Lost, next_frame
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


# ---- direct --------------------------------------------------------------------------------------
# The worker's end of a direct connection; see `common/wire/direct.py`.
#
# The calling thread sends a small message. A sender thread sends a larger message, so that backward continues
# meanwhile. Payloads of replies are received directly into the model's tensors.


_CONNECT_S = 1.0
_LINGER_S = 2.0

Message = bytes | OutOfBand


class DirectError(Exception):
    """The direct connection cannot be made. The text is a phrase with the reason."""


class DirectConnection(DirectSocket):
    """One connection, made with a ticket. Raises OSError if it is lost, and EOFError if the server has ended it."""

    def __init__(
        self, address: str, port: int, ticket: bytes, credentials: Credentials, limit: Limit = NO_LIMIT
    ) -> None:
        self._limit = limit
        host, _ = split_address(address)
        deadline = time.monotonic() + _CONNECT_S
        with contextlib.ExitStack() as on_failure:
            try:
                connection = on_failure.enter_context(connect(host, port, deadline))
                set_socket_options(connection)
                if credentials.ca is not None:
                    connection = client_context(credentials).wrap_socket(connection, server_hostname=host)
                    on_failure.push(connection)
                connection.sendall(HELLO + ticket)
                connection.settimeout(left_s(deadline))
                if connection.recv(1) != ACCEPTED:
                    raise DirectError(f"port {port} (server.direct_port): the server did not take the ticket")
            except OSError as error:
                why = "no reply" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
                raise DirectError(f"port {port} (server.direct_port): {why}") from None
            on_failure.pop_all()
        super().__init__(connection)
        connection.settimeout(None if self._tls is None else 0)  # in TLS, a blocking call would stop the other thread
        self._outgoing: queue.SimpleQueue[Iterable[Message] | None] = queue.SimpleQueue()
        self._num_unsent = 0  # message lists that are queued for the thread, or that it sends
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---- out --------------------------------------------------------------------------------

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages in order. A write error is ignored here: the connection is lost, and `receive` raises."""
        with self._lock:
            if self._num_unsent == 0 and isinstance(messages, list):
                pieces: Pieces = []
                for message in messages:
                    pieces += to_buffers(message)
                if sum(map(len, pieces)) <= 2 * INLINE_BYTES:
                    with contextlib.suppress(OSError):
                        self._write(pieces)
                    return
            self._num_unsent += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="direct", daemon=True)
                self._thread.start()
        self._outgoing.put(messages)

    def _run(self) -> None:
        message: Message | None = None
        while (messages := self._outgoing.get()) is not None:
            try:
                with contextlib.suppress(OSError):
                    for message in messages:
                        self._write(to_buffers(message))
            except BaseException:  # the generator failed, so no reply will come
                self.hang_up()
                raise
            messages = message = None  # frees the payload while the thread waits
            with self._lock:
                self._num_unsent -= 1

    def _write(self, pieces: Pieces) -> None:
        at_once = self._limit.at_once
        for part in [pieces] if not at_once else (part for _, part in stretches(map(memoryview, pieces), 0, at_once)):
            unsent: Pieces = [*part]
            while unsent := self.send_now(unsent):
                self._wait(select.POLLOUT)
            if at_once:
                self._limit.passed("up", sum(map(len, part)))

    # ---- in ---------------------------------------------------------------------------------

    def receive(self) -> bytes | bytearray:
        """Receive the next message."""
        num_bytes = 0
        while (message := self.next_message(num_bytes)) is None:
            num_bytes = self._receive_some(self.free)
        return message

    def receive_into(self, targets: Iterator[memoryview]) -> None:
        """Receive the bytes that follow a message. Each target is filled: at the end of the stream this raises."""
        for target in targets:
            while len(target):
                if num_bytes := self.take(target):
                    target = target[num_bytes:]
                elif len(target) >= BUFFER_BYTES:
                    target = target[self._receive_some(target) :]
                else:  # one system call for several small targets
                    self._end += self._receive_some(self.free)

    def _receive_some(self, target: memoryview) -> int:
        """Receive at least one byte. Raises EOFError at the end.

        A read into a large target waits until WAKE_BYTES have arrived, which saves wake-ups.
        """
        if self._limit.at_once:
            target = target[: self._limit.at_once]
        if len(target) > BUFFER_BYTES or self._low_water > 1:
            self.wake_for(len(target))
        while True:
            try:
                if self._low_water > 1 and self._tls is None:
                    self._wait(select.POLLIN)
                    num_bytes = self._socket.recv_into(target, 0, socket.MSG_DONTWAIT)
                else:
                    num_bytes = self._receive(target)
                break
            except WAITS as error:
                self._wait(select.POLLOUT if isinstance(error, ssl.SSLWantWriteError) else select.POLLIN)
        if not num_bytes:
            raise EOFError
        if self._limit.at_once:
            self._limit.passed("down", num_bytes)
        return num_bytes

    def _wait(self, event: int) -> None:
        if (descriptor := self._socket.fileno()) < 0:
            raise ConnectionResetError("the connection was closed")
        ready = select.poll()
        ready.register(descriptor, event)
        ready.poll()

    # ---- the end ----------------------------------------------------------------------------

    def half_close(self) -> None:
        """Send the pending messages, then no more."""
        if self._thread is not None:
            self._outgoing.put(None)
            self._thread.join(_LINGER_S)
        self.shut_down(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End every read and write at once. Any thread may call it."""
        self.shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, its thread and its socket."""
        self.hang_up()
        self._outgoing.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LINGER_S)
        self._socket.close()


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Return a connection made by `deadline` (time.monotonic), through the proxy that gRPC uses.

    All addresses of the host share the time. The connection's timeout is the rest of it. Raises OSError.
    """
    _, proxy = proxy_of(host)
    target = (proxy.hostname or "", proxy.port or 80) if proxy is not None else (host, port)
    num_addresses = len(socket.getaddrinfo(*target, type=socket.SOCK_STREAM))
    connection = socket.create_connection(target, left_s(deadline) / num_addresses)
    try:
        connection.settimeout(left_s(deadline))
        if proxy is not None:
            wanted = join_address(host, port)
            connection.sendall(f"CONNECT {wanted} HTTP/1.1\r\nHost: {wanted}\r\n\r\n".encode())
            reply = b""
            while not reply.endswith(b"\r\n\r\n"):
                piece = connection.recv(1)  # byte by byte, because later bytes are the server's
                if not piece or len(reply) > 4096:
                    raise OSError(0, "the proxy does not connect")
                reply += piece
            if reply.split(b" ", 2)[1:2] != [b"200"]:
                raise OSError(0, f"the proxy says {reply.splitlines()[0][:80].decode('latin-1')}")
    except OSError:
        connection.close()
        raise
    return connection


def left_s(deadline: float) -> float:
    """Seconds until `deadline`. Raises TimeoutError if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
