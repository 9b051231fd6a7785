"""Serves the dashboard: uvicorn on a thread with its own loop, so that viewers slow nothing else down."""

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
from .app import MAX_VIEWERS, Runs, make_app
from .door import Door
from .feed import Control, Feed
from .guard import Guard
from .stored import Store

log = get_logger()

_STOP_S = 1.0
_PING_S = 20.0  # between two pings of a WebSocket, and for the reply
_TOKEN = secrets.token_urlsafe(16)  # where none is given; a restarted server keeps it


class _Server(uvicorn.Server):
    """A uvicorn server whose `door` accepts the connections, and which leaves signals to the program."""

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
        protocol: asyncio.Protocol = kind(self.config, self.server_state, self.lifespan.state)
        return protocol

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class Dashboard:
    """The dashboard of a process that has one run at a time."""

    def __init__(self, config: Config, store: Path | None = None, opens: str = "/") -> None:
        """`store`: the run store's file, None: the configured one; `opens`: the path of the printed URL.

        Raises AuthError for an address that others can reach without TLS and a token.
        """
        assert config.server.web is not None
        self._address, self._security = config.server.web, config.security
        host, run_token = split_address(self._address)[0], read_token(config.security)
        self._is_open = not is_loopback(host)
        if self._is_open and not config.server.insecure and (config.security.cert is None or run_token is None):
            lacks = "TLS (--cert, --key)" if config.security.cert is None else "a token (--token-file, or PS_TOKEN)"
            raise AuthError(
                f"the dashboard at {self._address} could be opened from other machines, and lacks {lacks}",
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
        """Listen. Raises BindError."""
        listening = self._bind()
        host, port = split_address(self._address)[0], listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._loop = asyncio.new_event_loop()
        self._runs = Runs(Store(self._store))
        guard = Guard(make_app(self._runs), self._hosts, self._tokens, self._is_open, self._security.cert is not None)
        door = Door(guard)
        self._runs.max_viewers = min(MAX_VIEWERS, door.max // 2)
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
        self._thread = Thread(target=self._serve, name="dashboard", daemon=True)
        self._thread.start()
        scheme = "https" if self._security.cert is not None else "http"
        readers = "anyone with the token" if self._is_open else "this machine"
        url = f"{scheme}://{self.address}{self._opens}"
        self.url = f"{url}?token={self._token}"  # for the terminal only: logs are stored and forwarded
        log.info("dashboard", url=url, address=self.address, readable_by=readers)

    def _bind(self) -> socket.socket:
        host, port = split_address(self._address)
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            return socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            raise BindError(
                f"cannot listen on {self._address} for the dashboard: {error.strerror or error}",
                fix="choose --web HOST:PORT with another port (0 takes a free one)",
            ) from None

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(ssl.SSLError, OSError):
            self._loop.run_until_complete(self._server.serve())
        self._loop.close()

    # ---- from the run's thread ------------------------------------------------------------------

    def begin(self, view: View, control: Control | None = None, version: int = 0) -> None:
        """Show a run. `version`: where it continues; the run store has the part before."""
        self._feed = feed = Feed(view, control)
        self._loop.call_soon_threadsafe(self._runs.begin, feed, version)

    def retell(self, about: About) -> None:
        """Show changed settings of the run."""
        if self._feed is not None:
            self._loop.call_soon_threadsafe(self._feed.retell, about)

    def push(self, tick: Tick) -> None:
        """Show the next tick."""
        if self._feed is not None:
            self._loop.call_soon_threadsafe(self._feed.push, tick)

    def close(self) -> None:
        """Stop serving, after viewers have got the newest messages."""
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
