"""The page as part of a process: uvicorn on a thread with a loop of its own, so that viewers slow nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn

from ..common.config.addresses import split_address
from ..common.config.schema import Config
from ..common.errors import AuthError, BindError
from ..common.reporting.log import get_logger
from ..common.reporting.view import About, Tick, View
from ..common.runstore.schema import FILE
from ..common.security import WEB_TOKEN_VARIABLE, is_loopback, read_token
from .app import MOST_VIEWERS, Runs, make_app
from .door import Door
from .feed import Control, Feed
from .guard import Guard
from .stored import Store

log = get_logger()

_STOP_S = 1.0
_PING_S = 20.0  # between two pings of a WebSocket, and for the answer
_TOKEN = secrets.token_urlsafe(16)  # where none is given; a server that goes back keeps it


class _Server(uvicorn.Server):
    """Signals stay the program's, and `door` accepts the connections."""

    def __init__(self, config: uvicorn.Config, door: Door, listening: socket.socket) -> None:
        super().__init__(config)
        self._door, self._listening = door, listening
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._door.accept(self._listening, self._protocol, self.config.ssl))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        self._listening.close()
        await super().shutdown(sockets=[])

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class Page:
    """Of a process that has one run at a time."""

    def __init__(self, config: Config, store: Path | None = None, opens: str = "/") -> None:
        """`store`: the file of runs, None: the configuration's; `opens`: the path that is printed.

        AuthError for an address that others can reach without TLS and a token.
        """
        assert config.server.web is not None
        self._address = config.server.web
        self._security = config.security
        host = split_address(self._address)[0]
        run_token = read_token(config.security)
        self._is_open = not is_loopback(host)
        if self._is_open and not config.server.insecure and (config.security.cert is None or run_token is None):
            lacks = "TLS (--cert, --key)" if config.security.cert is None else "a token (--token-file, or PS_TOKEN)"
            raise AuthError(
                f"the page at {self._address} could be opened from other machines, and lacks {lacks}",
                fix="ps-certs init makes certificates and a token; on one machine use --web 127.0.0.1:8080, "
                "and from elsewhere ssh -L 8080:127.0.0.1:8080; on a network you trust add --insecure",
            )
        self._store = store or Path(config.output.track_dir) / FILE
        self._opens = opens
        self._token = os.environ.get(WEB_TOKEN_VARIABLE) or _TOKEN
        self._tokens = [self._token, *([run_token] if run_token else [])]
        self._hosts = [] if self._is_open else ["localhost", "127.0.0.1", "::1", host]
        self._thread: Thread | None = None
        self._feed: Feed | None = None
        self.address = self.url = ""

    def start(self) -> None:
        """Listen; BindError when the address cannot be had."""
        listening = self._bind()
        host, port = split_address(self._address)[0], listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._loop = asyncio.new_event_loop()
        self._runs = Runs(Store(self._store))
        guard = Guard(make_app(self._runs), self._hosts, self._tokens, self._is_open, self._security.cert is not None)
        door = Door(guard)
        self._runs.most_viewers = min(MOST_VIEWERS, door.most // 2)
        self._server = _Server(
            uvicorn.Config(
                door, lifespan="off", access_log=False, log_level="critical", log_config=None, server_header=False,
                timeout_graceful_shutdown=1, ssl_certfile=self._security.cert, ssl_keyfile=self._security.key,
                ws_max_size=1 << 16, ws_ping_interval=_PING_S, ws_ping_timeout=_PING_S,
                h11_max_incomplete_event_size=1 << 16,
                proxy_headers=False,  # the door knows connections by their address
            ),
            door,
            listening,
        )  # fmt: skip
        self._thread = Thread(target=self._carry, name="page", daemon=True)
        self._thread.start()
        scheme = "https" if self._security.cert is not None else "http"
        readable = "whoever has the token" if self._is_open else "this machine"
        url = f"{scheme}://{self.address}{self._opens}"
        self.url = f"{url}?token={self._token}"  # for the terminal: a log goes places
        log.info("page", url=url, address=self.address, readable_by=readable)

    def _bind(self) -> socket.socket:
        host, port = split_address(self._address)
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listening = socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            raise BindError(
                f"cannot listen on {self._address} for the page: {error.strerror or error}",
                fix="choose --web HOST:PORT with another port (0 takes a free one)",
            ) from None
        return listening

    def _carry(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(ssl.SSLError, OSError):
            self._loop.run_until_complete(self._server.serve())
        self._loop.close()

    # ---- from the run's thread ------------------------------------------------------------------

    def begin(self, view: View, control: Control | None = None, version: int = 0) -> None:
        """`version`: that the run goes on from; what is on record of it up to there is shown too."""
        self._feed = feed = Feed(view, control)
        self._loop.call_soon_threadsafe(self._runs.begin, feed, version)

    def retell(self, about: About) -> None:
        if self._feed is not None:
            self._loop.call_soon_threadsafe(self._feed.retell, about)

    def push(self, tick: Tick) -> None:
        if self._feed is not None:
            self._loop.call_soon_threadsafe(self._feed.push, tick)

    def close(self) -> None:
        """Viewers are given what is on its way."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_STOP_S + 2.0)

    def _end(self) -> None:
        if self._feed is not None:
            self._feed.end()
        self._loop.call_later(0.2, self._stop)

    def _stop(self) -> None:
        self._runs.stopped.set()
        self._server.should_exit = True
