"""The port for direct connections, and one of them: see `common/wire/direct.py`.

Sockets are read and written on the event loop, without a task or a copy of their own: what has not come yet is waited
for, and a body is received in the memory that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable

from ...common.config.addresses import split_address
from ...common.config.schema import Config, SecurityConfig
from ...common.errors import BindError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.wire.direct import HELLO, LENGTH_BYTES, TAKEN, TICKET_BYTES, TICKET_S, length_of, prepare
from ...common.wire.frames import MAX_MESSAGE_BYTES

log = get_logger()

_BUFFER_BYTES = 64 << 10
_HELLO_S = 10.0
_MAX_STRANGERS = 64  # connections that have not shown a ticket yet
_WAITS = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """One socket, used by the task of its stream. Everything raises OSError when the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._descriptor = connection.fileno()
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of it has come and was not taken
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False

    # ---- in ---------------------------------------------------------------------------------

    async def read(self) -> bytes | None:
        """The next message; None at the end."""
        while self._end - self._start < LENGTH_BYTES:
            if not await self._fill():
                return None
        num_bytes = length_of(self._buffer, self._start)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise refusal(
                Reason.LIMIT_EXCEEDED, f"a message of {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} are possible"
            )
        self._start += LENGTH_BYTES
        if num_bytes > _BUFFER_BYTES - LENGTH_BYTES:
            message = bytearray(num_bytes)
            return bytes(message) if await self.receive_into(memoryview(message)) else None
        while self._end - self._start < num_bytes:
            if not await self._fill():
                return None
        start, self._start = self._start, self._start + num_bytes
        return bytes(self._view[start : self._start])

    async def receive_into(self, target: memoryview) -> bool:
        """Bytes that follow a message; False when they end before."""
        done = min(len(target), self._end - self._start)
        target[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            num_bytes = await self._receive(target[done:])
            if not num_bytes:
                return False
            done += num_bytes
        return True

    async def _fill(self) -> bool:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end == _BUFFER_BYTES:
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        num_bytes = await self._receive(self._view[self._end :])
        self._end += num_bytes
        return num_bytes > 0

    async def _receive(self, target: memoryview) -> int:
        while True:
            try:
                return self._socket.recv_into(target)
            except ssl.SSLWantWriteError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            except _WAITS:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)

    # ---- out --------------------------------------------------------------------------------

    def send_now(self, pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Give the system what it takes; what is left."""
        while pieces:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    num_sent = self._socket.send(pieces[0])
                else:
                    num_sent = self._socket.sendmsg(pieces[:64])
            except _WAITS:
                break
            pieces = _after(pieces, num_sent)
        return pieces

    async def send(self, pieces: list[bytes | memoryview]) -> None:
        """Returns when the system has all of it."""
        while pieces := self.send_now(pieces):
            await self._wait(self._loop.add_writer, self._loop.remove_writer)

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        add(self._descriptor, _set, ready)
        self._waiting.add(ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._is_closed:  # its number may be another connection's by now
                remove(self._descriptor)

    def close(self) -> None:
        """At once; the peer reads what was sent, and the end. Whoever waits for it gets a ConnectionError."""
        if self._is_closed:
            return
        self._is_closed = True
        for ready in self._waiting:
            if not ready.done():
                ready.set_exception(ConnectionResetError("the connection was closed"))
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    async def handshake(self) -> None:
        """TLS, where it is spoken. Raises ssl.SSLError, OSError."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return
        while True:
            try:
                self._socket.do_handshake()
                return
            except ssl.SSLWantWriteError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLWantReadError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _after(pieces: list[bytes | memoryview], num_bytes: int) -> list[bytes | memoryview]:
    """Without the first `num_bytes`."""
    for index, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [memoryview(piece)[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= len(piece)
    return []


class Ticket:
    """Good for one connection. `arrived` is it, when somebody has shown the ticket in time."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(TICKET_BYTES)
        self.arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    def drop(self) -> None:
        """Nobody waits for it any more."""
        if self.arrived.done() and not self.arrived.cancelled():
            self.arrived.result().close()
        self.arrived.cancel()


class Port:
    """Where direct connections are made. Nothing is there unless `server.direct`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._socket: socket.socket | None = None
        self._tickets: dict[bytes, Ticket] = {}
        self._strangers: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.number = 0

    def bind(self) -> None:
        """Take the port; BindError when one was asked for by number and cannot be had."""
        server = self._config.server
        if not server.direct:
            return
        host, _ = split_address(server.listen)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, server.direct_port, type=socket.SOCK_STREAM)[0]
            is_any = host in ("::", "0.0.0.0")
            self._socket = socket.create_server(
                address[:2], family=family, backlog=1024, dualstack_ipv6=is_any and family == socket.AF_INET6
            )
        except OSError as error:
            if server.direct_port:
                raise BindError(
                    f"cannot listen on port {server.direct_port} for direct connections (server.direct_port): "
                    f"{error.strerror}",
                    fix="stop the other process, or take another port (0: a free one), or --set server.direct=false",
                ) from None
            log.warning("no_direct_port", reason=str(error), meaning="workers exchange over gRPC")
            return
        self._socket.setblocking(False)
        self.number = self._socket.getsockname()[1]

    def open(self) -> None:
        if self._socket is not None:
            self._accepting = asyncio.create_task(self._accept(self._socket))

    def offer(self) -> Ticket | None:
        """A new one; None where there is no port."""
        if self._accepting is None:
            return None
        ticket = Ticket()
        self._tickets[ticket.secret] = ticket
        asyncio.get_running_loop().call_later(TICKET_S, self._tickets.pop, ticket.secret, None)
        return ticket

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stranger, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors left, as a rule
                log.warning("direct_not_accepted", reason=str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._strangers) >= _MAX_STRANGERS:
                stranger.close()
                continue
            task = asyncio.create_task(self._meet(stranger))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    async def _meet(self, stranger: socket.socket) -> None:
        """Hear a ticket, or close. A stranger is told nothing."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(_HELLO_S):
                stranger.setblocking(False)
                prepare(stranger)
                if self._config.security.cert is not None:
                    stranger = _context(self._config.security).wrap_socket(
                        stranger, server_side=True, do_handshake_on_connect=False
                    )
                connection = Connection(stranger)
                await connection.handshake()
                hello = bytearray(len(HELLO) + TICKET_BYTES)
                is_whole = await connection.receive_into(memoryview(hello))
                ticket = self._tickets.pop(bytes(hello[len(HELLO) :]), None)
                if not is_whole or not hello.startswith(HELLO) or ticket is None or ticket.arrived.done():
                    log.info("direct_refused", reason="no ticket of ours, or one that was used or is too old")
                    connection.close()
                    return
                ticket.arrived.set_result(connection)
                await connection.send([TAKEN])
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            if connection is not None:
                connection.close()
            stranger.close()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def close(self) -> None:
        tasks = [*self._strangers, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accepting = None
        if self._socket is not None:
            self._socket.close()


def _context(security: SecurityConfig) -> ssl.SSLContext:
    """As the files are now: they may have been renewed. Raises ssl.SSLError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert security.cert is not None
    context.load_cert_chain(security.cert, security.key)
    if security.mutual and security.ca is not None:
        context.load_verify_locations(security.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
