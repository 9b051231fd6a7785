"""Serves an application over HTTP: guard and door around it, uvicorn on a thread with its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ..common.config.addresses import is_loopback, join_address, split_address
from ..common.config.schema import Config
from ..common.errors import BindError
from ..common.security import WEB_TOKEN_VARIABLE, check_exposure, read_token
from .door import Door
from .guard import Guard, Rules

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
