"""The worker's end of a direct connection; see `common/wire/direct.py`.

The calling thread sends a small message. A sender thread sends a larger message, so that backward continues meanwhile.
Payloads of replies are received directly into the model's tensors.
"""

from __future__ import annotations

import contextlib
import io
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from ...common.config.addresses import join_address, split_address
from ...common.proxies import proxy_of
from ...common.security import Credentials, client_context
from ...common.wire.direct import (
    ACCEPTED,
    HELLO,
    LENGTH_BYTES,
    MAX_SEND_BYTES,
    WAKE_BYTES,
    LowWater,
    OutOfBand,
    Pieces,
    decode_length,
    drop_front,
    set_socket_options,
    shut_down,
    take_front,
    to_buffers,
)
from ...common.wire.frames import INLINE_BYTES, MAX_MESSAGE_BYTES
from ..transports.limit import NO_LIMIT, Limit

_CONNECT_S = 1.0
_BUFFER_BYTES = 64 << 10
_LINGER_S = 2.0

Message = bytes | OutOfBand


class DirectError(Exception):
    """The direct connection cannot be made. The text is a phrase with the reason."""


class _Incoming(io.RawIOBase):
    """Raw stream whose bytes come from `receive`."""

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self.readinto = receive  # type: ignore[method-assign, assignment]

    def readable(self) -> bool:
        return True


class DirectConnection:
    """One connection, made with a ticket. Raises OSError if it is lost, and EOFError if the server has ended it."""

    def __init__(
        self, address: str, port: int, ticket: bytes, credentials: Credentials, limit: Limit = NO_LIMIT
    ) -> None:
        self._limit = limit
        host, _ = split_address(address)
        deadline = time.monotonic() + _CONNECT_S
        with contextlib.ExitStack() as on_failure:
            try:
                self._socket = on_failure.enter_context(connect(host, port, deadline))
                set_socket_options(self._socket)
                if credentials.ca is not None:
                    self._socket = client_context(credentials).wrap_socket(self._socket, server_hostname=host)
                    on_failure.push(self._socket)
                self._socket.sendall(HELLO + ticket)
                self._socket.settimeout(left_s(deadline))
                if self._socket.recv(1) != ACCEPTED:
                    raise DirectError(f"port {port} (server.direct_port): the server did not take the ticket")
            except OSError as error:
                why = "no reply" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
                raise DirectError(f"port {port} (server.direct_port): {why}") from None
            on_failure.pop_all()
        self._socket.settimeout(0 if isinstance(self._socket, ssl.SSLSocket) else None)
        self._reader = io.BufferedReader(_Incoming(self._receive), _BUFFER_BYTES)
        self._tls_lock = threading.Lock()
        self._low_water = LowWater(self._socket)
        self._outgoing: queue.SimpleQueue[Iterable[Message] | None] = queue.SimpleQueue()
        self._num_unsent = 0  # message lists that are queued for the thread, or that it sends
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---- out --------------------------------------------------------------------------------

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages in order. A write error is ignored here: the connection is lost, and `receive` raises."""
        with self._lock:
            if self._num_unsent == 0 and isinstance(messages, list):
                buffers = [buffer for message in messages for buffer in to_buffers(message)]
                if sum(map(len, buffers)) <= 2 * INLINE_BYTES:
                    with contextlib.suppress(OSError):
                        self._write(buffers)
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
        while pieces:
            now = take_front(pieces, self._limit.at_once or MAX_SEND_BYTES)
            if isinstance(self._socket, ssl.SSLSocket):
                num_bytes = self._retry_tls(self._socket.send, now[0])
            else:
                num_bytes = self._socket.sendmsg(now)
            if self._limit.at_once:
                self._limit.passed("up", num_bytes)
            pieces = drop_front(pieces, num_bytes)

    # ---- in ---------------------------------------------------------------------------------

    def receive(self) -> bytes:
        """Receive the next message."""
        num_bytes = decode_length(self._reader.read(LENGTH_BYTES))
        if num_bytes > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {num_bytes} bytes")
        return self._reader.read(num_bytes)

    def receive_into(self, targets: Iterator[memoryview]) -> None:
        """Receive the bytes that follow a message. Each target is filled: at the end of the stream this raises."""
        for target in targets:
            self._reader.readinto(target)

    def _receive(self, target: memoryview) -> int:
        """Receive at least one byte. Raises EOFError at the end.

        Without TLS, a read into a large target waits until WAKE_BYTES have arrived, which saves wake-ups.
        """
        if self._limit.at_once:
            target = target[: self._limit.at_once]
        if isinstance(self._socket, ssl.SSLSocket):
            num_bytes = self._retry_tls(self._socket.recv_into, target)
        elif len(target) <= _BUFFER_BYTES:
            self._low_water.set(1)
            num_bytes = self._socket.recv_into(target)
        else:
            num_bytes = self._receive_large(target)
        if not num_bytes:
            raise EOFError
        if self._limit.at_once:
            self._limit.passed("down", num_bytes)
        return num_bytes

    def _receive_large(self, target: memoryview) -> int:
        while True:
            self._low_water.set(min(len(target), WAKE_BYTES))
            self._wait(select.POLLIN)
            with contextlib.suppress(BlockingIOError):
                return self._socket.recv_into(target, len(target), socket.MSG_DONTWAIT)

    def _retry_tls(self, call: Callable[[memoryview], int], data: memoryview) -> int:
        """Repeat a non-blocking TLS call until it succeeds.

        OpenSSL allows only one thread per connection at a time, so a blocking call would stop the other thread.
        """
        while True:
            try:
                with self._tls_lock:
                    return call(data)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            self._wait(event)

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
        with contextlib.suppress(OSError):
            shut_down(self._socket, socket.SHUT_WR)

    def hang_up(self) -> None:
        """End every read and write at once. Any thread may call it."""
        with contextlib.suppress(OSError):
            shut_down(self._socket, socket.SHUT_RDWR)

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
