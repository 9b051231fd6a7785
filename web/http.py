"""Serves an application over HTTP: guard and door around it, uvicorn on a thread with its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..common.config.addresses import is_loopback, join_address, split_address
from ..common.config.schema import Config
from ..common.errors import BindError
from ..common.reporting.log import get_logger
from ..common.security import WEB_TOKEN_VARIABLE, check_exposure, read_token
from .guard import Guard, Rules

log = get_logger()

_STOP_S = 1.0
_PING_S = 20.0  # between two pings of a WebSocket, and the limit for the reply to a ping
_TOKEN = secrets.token_urlsafe(16)  # made if none is given; a restarted server keeps it


class _Server(uvicorn.Server):
    """A uvicorn server whose `door` accepts the connections. It handles no signals, because it runs on a thread."""

    def __init__(self, config: uvicorn.Config, door: Door, listening: socket.socket) -> None:
        super().__init__(config)
        self._door, self._listening = door, listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        kind: Any = self.config.http_protocol_class
        protocol = partial(kind, self.config, self.server_state, self.lifespan.state)
        self._accepting = asyncio.create_task(self._door.accept(self._listening, protocol, self.config.ssl))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listening.close()
        await super().shutdown(sockets=[])


class HttpServer:
    """Listens at `address`. Errors name the option `flag` and the application `name`.

    Raises AuthError if other machines can reach the address and TLS or the token is missing.
    """

    def __init__(self, address: str, config: Config, rules: Rules, *, name: str, flag: str) -> None:
        self._address, self._security, self._rules = address, config.security, rules
        self._name, self._flag = name, flag
        host, run_token = split_address(address)[0], read_token(config.security)
        self.is_open = not is_loopback(host)
        otherwise = f"on one machine use {flag} 127.0.0.1:8080, and from elsewhere ssh -L 8080:127.0.0.1:8080"
        check_exposure(name, address, config, has_token=run_token is not None, otherwise=otherwise)
        self._token = os.environ.get(WEB_TOKEN_VARIABLE) or _TOKEN
        hosts = [] if self.is_open else ["localhost", "127.0.0.1", "::1", host]
        tokens, is_tls = [self._token, *([run_token] if run_token else [])], config.security.cert is not None
        self._guard = partial(Guard, hosts=hosts, tokens=tokens, is_tls=is_tls, rules=rules)
        self._thread: Thread | None = None

    def start(self, app: ASGIApp) -> Door:
        """Listen, and serve the application. Raises BindError."""
        host, port = split_address(self._address)
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listening = socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            message = f"cannot listen on {self._address} for {self._name}: {error.strerror or error}"
            fix = f"choose {self._flag} HOST:PORT with another port (0 takes a free one)"
            raise BindError(message, fix=fix) from None
        self.loop = asyncio.new_event_loop()
        self.address = join_address(host, listening.getsockname()[1])
        door = Door(self._guard(app), self._rules)
        self._server = _Server(
            uvicorn.Config(
                door, http="h11",
                lifespan="off", access_log=False, log_level="critical", log_config=None, server_header=False,
                timeout_graceful_shutdown=1, ssl_certfile=self._security.cert, ssl_keyfile=self._security.key,
                ws_max_size=1 << 16, ws_ping_interval=_PING_S, ws_ping_timeout=_PING_S,
                h11_max_incomplete_event_size=1 << 16,
                proxy_headers=False,  # the door identifies connections by their address
            ),
            door,
            listening,
        )  # fmt: skip
        self._thread = Thread(target=self._serve, name=self._name.split()[-1], daemon=True)
        self._thread.start()
        return door

    def url(self, path: str) -> str:
        """The address of a page, for the log."""
        return f"{'https' if self._security.cert is not None else 'http'}://{self.address}{path}"

    def url_with_token(self, path: str) -> str:
        """The address of a page with the token, for the terminal only: logs are stored and forwarded."""
        return f"{self.url(path)}?token={self._token}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.suppress(ssl.SSLError, OSError):
            self.loop.run_until_complete(self._server.serve())
        self.loop.close()

    def close(self, before: Callable[[], None] = lambda: None, delay_s: float = 0.0) -> None:
        """Stop serving: call `before` on the loop, and after a delay end the connections."""
        if self._thread is None or not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(before)
        time.sleep(delay_s)
        self._server.should_exit = True
        self._thread.join(_STOP_S + 2.0)


# ---- connections ---------------------------------------------------------------------------------
# Accepts the connections of an HTTP server, and limits their number and the time that their peers take.
#
# uvicorn accepts every connection, and waits for its first request without a limit: 1,224 silent connections took all
# file descriptors of a server, which could then write no snapshots and accept no workers. Here a connection without a
# request is *idle*. At the maximum, a new connection replaces the connection that has been idle longest, and if none
# is idle, its request is refused with 503. The door closes a connection that is idle for `_IDLE_S`, or whose peer
# reads no bytes for `_PROGRESS_S`. The guard limits the time of a request's body; the application has no limit here.


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
