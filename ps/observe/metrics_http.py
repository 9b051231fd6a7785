"""The address Prometheus scrapes (`server.metrics`): GET /metrics, answered on the event loop.

Plain HTTP, for whoever reaches it, also where workers need TLS and a token: there is nothing in it that
could be kept secret, and it changes nothing. Whoever would rather not show it gives a loopback address. What
one caller can cost is bounded: a short request, in time, one answer to a connection, a few connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...common.config.schema import Config
from ...common.errors import BindError
from ...common.reporting.history import History
from ...common.reporting.log import get_logger
from ...common.security import is_loopback, split_address

# prometheus-client is imported where metrics are asked for: most servers run without.
if TYPE_CHECKING:
    from ..core.run import Run
    from .metrics import Counters

log = get_logger()

PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_HEAD_BYTES = 16 << 10
_MAX_CONNECTIONS = 16
_REQUEST_S = 5.0


def server_history(config: Config, is_written: bool = True) -> History:
    """The server's history; one that counts, where metrics are asked for. Of several shards one writes it down."""
    path = config.output.history if is_written else None
    if config.server.metrics is None:
        return History(path, "server")
    split_address(config.server.metrics)
    from .metrics import Counters

    return Counters(path)


class MetricsEndpoint:
    """Listens from `open` to `close`."""

    def __init__(self, counters: Counters, request_s: float = _REQUEST_S) -> None:
        self._counters = counters
        self._request_s = request_s
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def open(self, address: str) -> None:
        """BindError when the address cannot be had."""
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        except OSError:
            raise BindError(
                f"cannot listen on {address} for metrics: port in use, or not an address of this machine",
                fix="choose --metrics HOST:PORT with another port (0 takes a free one)",
            ) from None
        bound = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        who = "this machine" if is_loopback(host) else "anyone who reaches this port"
        log.info("metrics", url=f"http://{self.address}{PATH}", readable_by=who)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._connections:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(writer)
        try:
            async with asyncio.timeout(self._request_s):
                writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            writer.transport.abort()  # not a request, or what it does not take
        except asyncio.CancelledError:
            writer.transport.abort()  # the server ends; asyncio.streams would print a cancelled task
        finally:
            self._connections.discard(writer)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.split(b" ")[0].partition(b"?")[0]
        if path != PATH.encode():
            return _response("404 Not Found", f"metrics are at {PATH}\n".encode())
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"", "Allow: GET, HEAD\r\n")
        return _response("200 OK", self._counters.text(), with_body=method == b"GET")


def _response(status: str, body: bytes, more: str = "", with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n".encode() + (body if with_body else b"")


async def open_metrics(config: Config, history: History, run: Run) -> MetricsEndpoint | None:
    """Begin to answer, where metrics are asked for."""
    if config.server.metrics is None:
        return None
    from .metrics import Counters

    assert isinstance(history, Counters)
    history.attach(run)
    endpoint = MetricsEndpoint(history)
    await endpoint.open(config.server.metrics)
    return endpoint
