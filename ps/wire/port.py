"""The port for direct connections, which workers open with a ticket from Welcome. Format: `common/wire/direct.py`.

A connection that has not shown a ticket yet is a stranger. The port keeps at most as many strangers as there are unused
tickets, plus _MORE_STRANGERS. Beyond that, a new stranger replaces the oldest.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from ...common.config.addresses import split_address
from ...common.config.schema import Config
from ...common.errors import BindError
from ...common.reporting.log import get_logger
from ...common.wire.direct import ACCEPTED, HELLO, TICKET_BYTES, TICKET_S, set_socket_options
from .connection import Connection
from .security import Certificates
from .stream import LogThrottle

log = get_logger()

_HELLO_S = 10.0
_MORE_STRANGERS = 64  # allowed beyond the number of tickets
_ACCEPT_AGAIN_S = 0.1


class Ticket:
    """A permission for one connection, within TICKET_S.

    If certificates are required, the peer's certificate must have the common name `name`. `arrived` becomes the
    connection once it has shown the ticket.
    """

    def __init__(self, name: str | None) -> None:
        self.name, self.secret = name, secrets.token_bytes(TICKET_BYTES)
        self.arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    def drop(self) -> None:
        """Close the connection of this ticket, also if it arrives later."""
        if self.arrived.done() and not self.arrived.cancelled():
            self.arrived.result().close()
        self.arrived.cancel()


class Port:
    """Accepts direct connections. Without `server.direct` it does nothing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._socket: socket.socket | None = None
        self._tickets: dict[bytes, Ticket] = {}
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._certificates = Certificates(config.security) if config.security.cert is not None else None
        self._throttle_refused, self._throttle_accepted = LogThrottle(), LogThrottle()
        self._accepting: asyncio.Task[None] | None = None
        self.number = 0

    def open(self) -> None:
        """Bind the port and accept connections. Raises BindError if `server.direct_port` is set and not available."""
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
                problem = f"cannot listen on port {server.direct_port} for direct connections (server.direct_port)"
                fix = "stop the other process, or choose another port (0: any free), or --set server.direct=false"
                raise BindError(f"{problem}: {error.strerror}", fix=fix) from None
            log.warning("no_direct_port", reason=str(error), meaning="workers exchange over gRPC")
            return
        self._socket.setblocking(False)
        self.number = self._socket.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._socket))

    def offer(self, name: str | None) -> Ticket | None:
        """Return a new ticket for the peer whose certificate has this common name, or None if there is no port."""
        if self._accepting is None:
            return None
        ticket = Ticket(name)
        self._tickets[ticket.secret] = ticket
        asyncio.get_running_loop().call_later(TICKET_S, self._tickets.pop, ticket.secret, None)
        return ticket

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stranger, _ = await loop.sock_accept(listening)
            except OSError as error:  # usually because no descriptors are left
                self._throttle_accepted.log(log.warning, "direct_not_accepted", reason=error.strerror or str(error))
                self._drop_oldest()
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._strangers) >= _MORE_STRANGERS + len(self._tickets):
                self._drop_oldest()
            task = asyncio.create_task(self._meet(stranger))
            self._strangers[task] = None
            task.add_done_callback(lambda task: self._strangers.pop(task, None))

    def _drop_oldest(self) -> None:
        for task in self._strangers:
            del self._strangers[task]
            task.cancel()
            return

    async def _meet(self, stranger: socket.socket) -> None:
        """Receive a ticket and accept the connection, or close it without a reply."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(_HELLO_S):
                stranger.setblocking(False)
                set_socket_options(stranger)
                if self._certificates is not None:
                    context = self._certificates.context()
                    stranger = context.wrap_socket(stranger, server_side=True, do_handshake_on_connect=False)
                connection = Connection(stranger)
                await connection.handshake()
                hello = bytearray(len(HELLO) + TICKET_BYTES)
                is_whole = await connection.receive_into(memoryview(hello))
                if is_whole and (ticket := self._ticket_of(bytes(hello), connection)) is not None:
                    ticket.arrived.set_result(connection)
                    await connection.send([ACCEPTED])
                else:
                    connection.close()
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            if connection is not None:
                connection.close()
            stranger.close()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _ticket_of(self, hello: bytes, connection: Connection) -> Ticket | None:
        """Return the ticket that a stranger shows if it is known, unused, and made for this peer. Otherwise None."""
        secret, name = hello[len(HELLO) :], connection.certificate_name()
        ticket = self._tickets.get(secret) if hello.startswith(HELLO) else None
        why = "the ticket is unknown, used or expired"
        if ticket is not None and ticket.name != name:
            why = f"the ticket belongs to another peer than {(name or '')[:100]!a}"
        elif ticket is not None and not ticket.arrived.done():
            return self._tickets.pop(secret)
        self._throttle_refused.log(log.info, "direct_refused", reason=why)
        return None

    async def close(self) -> None:
        """Close the port and all strangers."""
        tasks = [*self._strangers, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accepting = None
        if self._socket is not None:
            self._socket.close()
