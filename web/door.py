"""Accepts the connections of an HTTP server, and limits their number and the time that their peers take.

uvicorn accepts every connection, and waits for its first request without a limit: 1,224 silent connections took all
file descriptors of a server, which could then write no snapshots and accept no workers. Here a connection without a
request is *idle*. At the maximum, a new connection replaces the connection that has been idle longest, and if none is
idle, its request is refused with 503. This module closes a connection that is idle for `_IDLE_S`, or whose peer reads
no bytes for `_PROGRESS_S`. The guard limits the time of a request's body; the application has no limit here.
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
from .guard import Rules

log = get_logger()

_MIN_CONNECTIONS = 8
_MAX_REFUSED = 16  # connections beyond the maximum whose requests are refused; more are closed
_IDLE_S = 10.0  # until the first request, or the next one; also for a TLS handshake
_PROGRESS_S = 30.0  # for a peer to read the next bytes of a response
_MAX_UNSENT_BYTES = 8 << 20  # that a peer does not read; responses wait earlier, replies to its pings do not
_CHECK_S = 0.5
_ACCEPT_AGAIN_S = 0.1

Address = tuple[str, int]
MakeProtocol = Callable[[], asyncio.Protocol]


class _Connection:
    """One accepted socket. `until`: the loop's time at which it ends without progress."""

    def __init__(
        self, accepted: socket.socket, until: float, opening: asyncio.Task[asyncio.Transport], is_refused: bool
    ) -> None:
        self.socket, self.until, self.opening = accepted, until, opening
        self.is_idle = True
        self.is_refused = is_refused  # there are too many

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport; None during a TLS handshake and after a failed handshake."""
        opening = self.opening
        is_open = opening.done() and not opening.cancelled() and opening.exception() is None
        return opening.result() if is_open else None

    def end(self) -> None:
        """End the connection at once, without sending the rest."""
        if (transport := self.transport) is not None:
            transport.abort()
        else:
            self.opening.cancel()


class Door:
    """Wraps an ASGI application, and records when requests begin and end. It runs in the HTTP server's thread."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        share = rules.max_connections if limit == resource.RLIM_INFINITY else limit // rules.share_of_descriptors
        self.max = max(_MIN_CONNECTIONS, min(rules.max_connections, share))
        self._app, self._refusal = app, rules.refusal
        self._connections: dict[tuple[Address, Address], _Connection] = {}  # by both addresses, the oldest first

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

        connection.is_idle, connection.until = False, math.inf
        app = self._refused if connection.is_refused else self._app
        try:
            await app(scope, receive, sends)
        finally:
            connection.is_idle, connection.until = True, now() + _IDLE_S

    async def _refused(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._refusal(503, f"all {self.max} connections of this server are in use", "ask again later")
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    async def accept(self, listening: socket.socket, make: MakeProtocol, tls: ssl.SSLContext | None) -> None:
        """Accept connections until this is cancelled. `make`: creates the protocol of a connection."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        checking = asyncio.create_task(self._check())
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError as error:  # usually no descriptors are left
                    log.debug("connection_not_accepted", reason=error.strerror or str(error))
                    self._end_longest_idle()
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                self._take(accepted, make, tls)
        finally:
            checking.cancel()
            opening = [item.opening for item in self._connections.values() if not item.opening.done()]
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    def _take(self, accepted: socket.socket, make: MakeProtocol, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._forget_gone()
        is_full = len(self._connections) >= self.max and not self._end_longest_idle()
        if is_full and len(self._connections) >= self.max + _MAX_REFUSED:
            accepted.close()
            return
        try:
            ends = _address(accepted.getpeername()), _address(accepted.getsockname())
        except OSError:  # closed already
            accepted.close()
            return
        opening = loop.create_task(_opened(accepted, make, tls))
        self._connections[ends] = _Connection(accepted, loop.time() + _IDLE_S, opening, is_full)

    def _forget_gone(self) -> None:
        self._connections = {ends: item for ends, item in self._connections.items() if item.socket.fileno() >= 0}

    def _end_longest_idle(self) -> bool:
        """End the connection that is idle longest. Returns False if every connection has a request."""
        them = self._connections.items()
        idle = [(item.until, ends) for ends, item in them if item.is_idle and not item.is_refused]
        if idle:
            self._connections.pop(min(idle)[1]).end()
        return bool(idle)

    async def _check(self) -> None:
        """End connections that are over their time."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self._forget_gone()
            now = asyncio.get_running_loop().time()
            for connection in self._connections.values():
                transport = connection.transport
                if transport is not None and transport.is_closing() and connection.until == math.inf:
                    connection.until = now + _IDLE_S  # for the rest of its response
                num_unsent = transport.get_write_buffer_size() if transport is not None else 0
                if now > connection.until or num_unsent > _MAX_UNSENT_BYTES:
                    connection.end()


async def _opened(accepted: socket.socket, make: MakeProtocol, tls: ssl.SSLContext | None) -> asyncio.Transport:
    of_tls: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": _IDLE_S} if tls is not None else {}
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(make, accepted, **of_tls)
    except BaseException:
        accepted.close()
        raise
    return transport


def _address(name: Any) -> Address:
    """Returns the address in the form of a scope of uvicorn."""
    return str(name[0]), int(name[1])
