"""Accepts the connections of the page, and limits their number and the time that one may take.

uvicorn accepts every connection and waits for its first request without end: 1,224 silent connections took all
descriptors of a server, and with them its snapshots and joins. Here a connection without a request is *idle*. Where
there are as many connections as may be, a new one takes the place of the connection that has been idle longest. A
connection ends when it is idle for `_IDLE_S`, or when its peer does not take or send the next bytes for `_PROGRESS_S`.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..common.reporting.log import get_logger

log = get_logger()

_MOST_CONNECTIONS = 128
_LEAST_CONNECTIONS = 8
_SHARE_OF_DESCRIPTORS = 8  # the page takes one in so many; the others are for workers, snapshots and the history
_IDLE_S = 10.0  # to the first request, or the next one; also for a TLS handshake
_PROGRESS_S = 30.0  # for a request's body, for the start of a response, for the next bytes of a response
_MOST_UNSENT = 8 << 20  # bytes that a peer does not read; responses wait earlier, answers to its pings do not
_LOOK_S = 0.5
_ACCEPT_AGAIN_S = 0.1

Address = tuple[str, int]


class _Connection:
    """One accepted socket. `until`: the loop's time at which it ends unless something happens before."""

    def __init__(self, accepted: socket.socket, until: float) -> None:
        self.socket = accepted
        self.until = until
        self.is_idle = True
        self.opening: asyncio.Task[asyncio.Transport] | None = None

    @property
    def transport(self) -> asyncio.Transport | None:
        """None during a TLS handshake, and where it failed."""
        opening = self.opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()

    @property
    def is_gone(self) -> bool:
        return self.socket.fileno() < 0

    def end(self) -> None:
        """At once: what was not sent is lost."""
        if (transport := self.transport) is not None:
            transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class Door:
    """An ASGI application around another: it sees when requests begin and end. Lives in the page's thread."""

    def __init__(self, app: ASGIApp) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        share = _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else limit // _SHARE_OF_DESCRIPTORS
        self.most = max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, share))
        self._app = app
        self._connections: dict[tuple[Address, Address], _Connection] = {}  # by both ends; the oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._connections.get((scope.get("client"), scope.get("server")))  # type: ignore[arg-type]
        if connection is None:
            await self._app(scope, receive, send)
            return
        now = asyncio.get_running_loop().time

        async def sends(message: Message) -> None:
            connection.until = now() + _PROGRESS_S
            await send(message)
            connection.until = math.inf

        connection.is_idle, connection.until = False, now() + _PROGRESS_S
        try:
            await self._app(scope, receive, sends)
        finally:
            connection.is_idle, connection.until = True, now() + _IDLE_S

    async def accept(
        self, listening: socket.socket, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        """Accept connections until this is cancelled. `make`: the protocol of a new connection."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        looking = asyncio.create_task(self._look())
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError as error:  # no descriptors left, as a rule
                    log.debug("page_not_accepted", reason=error.strerror or str(error))
                    self._end_longest_idle()
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                self._take(accepted, make, tls)
        finally:
            looking.cancel()
            opening = [
                task for connection in self._connections.values() if (task := connection.opening) and not task.done()
            ]
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    def _take(self, accepted: socket.socket, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._forget_gone()
        if len(self._connections) >= self.most and not self._end_longest_idle():
            accepted.close()
            return
        try:
            ends = _address(accepted.getpeername()), _address(accepted.getsockname())
        except OSError:  # closed already
            accepted.close()
            return
        connection = _Connection(accepted, loop.time() + _IDLE_S)
        connection.opening = loop.create_task(_opened(accepted, make, tls))
        connection.opening.add_done_callback(_closed_where_it_failed(accepted))
        self._connections[ends] = connection

    def _forget_gone(self) -> None:
        self._connections = {
            ends: connection for ends, connection in self._connections.items() if not connection.is_gone
        }

    def _end_longest_idle(self) -> bool:
        """False where every connection has a request."""
        idle = [(connection.until, ends) for ends, connection in self._connections.items() if connection.is_idle]
        if not idle:
            return False
        self._connections.pop(min(idle)[1]).end()
        return True

    async def _look(self) -> None:
        """End connections that are over their time, five times in ten seconds and more."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._forget_gone()
            now = asyncio.get_running_loop().time()
            for connection in self._connections.values():
                transport = connection.transport
                if transport is not None and transport.is_closing() and connection.until == math.inf:
                    connection.until = now + _IDLE_S  # what it has not sent yet it may send
                if now > connection.until or (
                    transport is not None and transport.get_write_buffer_size() > _MOST_UNSENT
                ):
                    connection.end()


async def _opened(
    accepted: socket.socket, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
) -> asyncio.Transport:
    of_tls: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": _IDLE_S} if tls is not None else {}
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(make, accepted, **of_tls)
    return transport


def _closed_where_it_failed(accepted: socket.socket) -> Callable[[asyncio.Task[asyncio.Transport]], None]:
    def close(opening: asyncio.Task[asyncio.Transport]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            accepted.close()

    return close


def _address(name: Any) -> Address:
    """As in a scope of uvicorn."""
    return str(name[0]), int(name[1])
