"""The worker's end of a direct connection; see `common/wire/direct.py`.

The calling thread sends a small message. A sender thread sends a larger message, so that backward continues meanwhile.
Payloads of replies are received directly into the model's tensors.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator

from ...common.config.addresses import join_address, split_address
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
from ...common.wire.frames import INLINE_BYTES, stretches
from ..transports.limit import NO_LIMIT, Limit

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
