"""Authorizes HTTP requests before any route sees them.

* `Host` must be one of this server's names: otherwise 421. This stops a foreign page whose name was made to
  resolve to this server (DNS rebinding, as in CVE-2026-27482).
* A request with an `Origin` (a browser's) must come from this server's own page: otherwise 403.
* A request that changes something needs the token: otherwise 401.
* At an address that other machines can reach, every request needs the token: 401.
* The size of bodies (413), their time (408) and the number of viewers (503, in `app.py`) are limited.

The token comes as `Authorization: Bearer`, or as the cookie that `/?token=...` sets: HttpOnly, so that no script reads
it, and SameSite=Strict, so that no other page sends it. A browser sends a host's cookies to all of its ports, so the
cookie's name contains the port. Otherwise a login to one dashboard of a machine would end that of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READS = ("GET", "HEAD")
_COOKIE = "paramserver"
_MAX_DRAIN_BYTES, _MAX_DRAIN_S = 16 << 20, 2.0
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
     b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"),
]  # fmt: skip


def refusal(status: int, error: str, fix: str = "") -> Response:
    """Returns the response of a refusal, with the reason and the fix."""
    return JSONResponse({"error": error, "fix": fix}, status)


@dataclass(frozen=True)
class Rules:
    """Settings of one application.

    `pages`: paths that accept the token in their address. `writes_need_token`: changes need it on this machine too.
    `body_s`: for all of a body. Beyond `max_connections`, and beyond this process's descriptors divided by
    `share_of_descriptors`, requests are refused.
    """

    max_body_bytes: int = 64 << 10
    pages: tuple[str, ...] = ("/", "/runs")
    writes_need_token: bool = True
    refusal: Callable[[int, str, str], Response] = refusal
    body_s: float = 30.0
    max_connections: int = 128
    share_of_descriptors: int = 8  # workers, snapshots and the history need the others

    def payload_too_large(self) -> Response:
        error = f"the body is longer than the limit of {self.max_body_bytes} bytes"
        return self.refusal(413, error, "send a shorter body")


class Guard:
    """Wraps the application. `hosts`: valid names, without ports; empty: any, and every request needs the token.

    `tokens`: any of them is valid.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], tokens: Iterable[str], is_tls: bool, rules: Rules) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._tokens = tuple(tokens)
        self._is_public = not self._hosts
        self._is_tls, self._rules = is_tls, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection, request = HTTPConnection(scope), _LimitedRequest(scope, receive, send, self._rules)
        scope.setdefault("state", {})["may_control"] = self._has_token(connection)
        refused = self._refusal(scope, connection)
        if refused is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refused(scope, request.receive, request.reply)
            return
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:  # an application that expects the whole body
            if request.refused is None:
                raise
        if request.refused is not None:
            await request.refused(scope, request.receive, request.reply)

    def _refusal(self, scope: Scope, connection: HTTPConnection) -> Response | None:
        refusal, headers = self._rules.refusal, connection.headers
        if self._hosts and (_parts(f"//{headers.get('host', '')}").hostname or "") not in self._hosts:
            return refusal(421, "this server is not known by that name", f"ask for it as {sorted(self._hosts)[0]}")
        origin = headers.get("origin")
        if origin is not None and _parts(origin).netloc != headers.get("host"):
            return refusal(403, f"a page of {origin[:100]} may not use this server", "open this server's own page")
        if int(headers.get("content-length") or 0) > self._rules.max_body_bytes:
            return self._rules.payload_too_large()
        token = connection.query_params.get("token")
        if token and scope["type"] == "http" and scope["path"] in self._rules.pages:
            if not self._is_token(token):
                error = "the token in this address is not this server's"
                return refusal(403, error, "open the address that it printed last")
            # To the page, without the token in the address bar and the history.
            response, cookie = RedirectResponse(scope["path"], 303), cookie_of(headers.get("host", ""))
            response.set_cookie(cookie, token, httponly=True, samesite="strict", secure=self._is_tls)
            return response
        is_read = scope["type"] == "websocket" or scope.get("method") in _READS or not self._rules.writes_need_token
        if (self._is_public or not is_read) and not scope["state"]["may_control"]:
            fix = "open the address with ?token=... that the server printed, or send Authorization: Bearer TOKEN"
            return refusal(401, "this needs the token", fix)
        return None

    def _has_token(self, connection: HTTPConnection) -> bool:
        scheme, _, rest = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(rest.strip()):
            return True
        # The cookie of any port will do, as the token is checked: so the dashboard may link to ps-serve.
        return any(name.startswith(_COOKIE) and self._is_token(value) for name, value in connection.cookies.items())

    def _is_token(self, value: str) -> bool:
        found = [hmac.compare_digest(value.encode(), token.encode()) for token in self._tokens]  # constant time
        return any(found)


def cookie_of(host: str) -> str:
    """Returns the name of the cookie for this host and port."""
    port = host.rpartition(":")[2]
    return f"{_COOKIE}-{port}" if port.isascii() and port.isdigit() else _COOKIE


def _parts(address: str) -> SplitResult:
    """Returns the parts of an address, empty ones if it has none. The host of `[::1]:80` is `::1`."""
    try:
        return urlsplit(address)
    except ValueError:  # an unbalanced bracket
        return urlsplit("")


class _LimitedRequest:
    """`receive` and `send` of one request: limits its body, adds headers to the reply, and ends the connection.

    Most clients send the whole body before they read the reply. If the connection closed earlier, they would see a
    reset connection instead of the reply (RFC 9112, 9.6). So the rest of a body is received and dropped after the
    reply, up to _MAX_DRAIN_BYTES and for _MAX_DRAIN_S.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, rules: Rules) -> None:
        self._receive, self._send, self._rules = receive, send, rules
        self._until = asyncio.get_running_loop().time() + rules.body_s
        self._is_read_only = scope.get("method") in _READS
        self._is_body_complete = self._is_read_only or scope["type"] != "http"
        self._num_bytes = 0
        self._has_response_started = False
        self.refused: Response | None = None  # for a body that is too long or too slow; then the application sends none

    async def receive(self) -> Message:
        """Receive a message. A body that is too long or too slow ends like one whose client is gone."""
        try:
            async with asyncio.timeout_at(None if self._is_body_complete else self._until):
                message = await self._receive()
        except TimeoutError:
            # Once a response has started there can be no 408: the application sees that the client is gone.
            if not self._has_response_started:
                error = f"the body did not arrive within {self._rules.body_s:g} s"
                self.refused = self._rules.refusal(408, error, "send it at once")
            return {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_body_complete = self._is_body_complete or not message.get("more_body", False)
            if self._num_bytes > self._rules.max_body_bytes:
                if not self._has_response_started:
                    self.refused = self._rules.payload_too_large()
                return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the application, unless the body is too long or too slow."""
        if self.refused is None:
            await self.reply(message)

    async def reply(self, message: Message) -> None:
        """Send a message of a response. Adds the headers, and receives the rest of the body before the last one."""
        self._has_response_started = True
        if message["type"] == "http.response.start":
            close = [] if self._is_read_only else [(b"connection", b"close")]
            message["headers"] = [*message.get("headers", []), *_HEADERS, *close]
        elif message["type"] == "http.response.body" and not (
            self._is_body_complete or message.get("more_body", False)
        ):
            await self._send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MAX_DRAIN_S):
                    while not self._is_body_complete and self._num_bytes < _MAX_DRAIN_BYTES:
                        received = await self._receive()
                        self._num_bytes += len(received.get("body", b""))
                        self._is_body_complete = not received.get("more_body", False)  # also if the client is gone
            message = {"type": "http.response.body"}
        await self._send(message)
