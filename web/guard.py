"""Authorizes HTTP requests before any route sees them.

* `Host` must be one of this server's names: otherwise 421. This stops a foreign page whose name was made to
  resolve to this server (DNS rebinding, as in CVE-2026-27482).
* A request that changes something needs the token. A browser (`Origin`) may send it only from this server's page: 403.
* At an address that other machines can reach, every request needs the token: 401.
* The size of bodies (413) and the number of viewers (503, in `app.py`) are limited.

The token comes as `Authorization: Bearer`, or as the cookie that `/?token=...` sets: HttpOnly, so that no script reads
it, and SameSite=Strict, so that no other page sends it. A browser sends a host's cookies to all of its ports, so the
cookie's name contains the port. Otherwise a login to one dashboard of a machine would end that of another.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READS = ("GET", "HEAD")
_COOKIE = "paramserver"
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
    """

    max_body_bytes: int = 64 << 10
    pages: tuple[str, ...] = ("/", "/runs")
    writes_need_token: bool = True
    refusal: Callable[[int, str, str], Response] = refusal


class Guard:
    """Wraps the application. `hosts`: valid names, without ports; empty: any, and every request needs the token.

    `tokens`: any of them is valid. `is_open`: other machines can reach the address.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str],
        tokens: Iterable[str],
        is_open: bool,
        is_tls: bool,
        rules: Rules = Rules(),
    ) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._tokens = tuple(tokens)
        self._is_open = is_open
        self._is_tls, self._rules = is_tls, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})["may_control"] = self._has_token(headers)
        refused = self._refusal(scope, headers)
        if refused is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                await refused(scope, receive, _with_headers(scope, send))
            return
        await self._app(scope, _limited(receive, self._rules.max_body_bytes), _with_headers(scope, send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        refusal, most = self._rules.refusal, self._rules.max_body_bytes
        if self._hosts and _name_of(headers.get("host", "")) not in self._hosts:
            return refusal(421, "this server is not known by that name", f"ask for it as {sorted(self._hosts)[0]}")
        origin = headers.get("origin")
        if origin is not None and _address_of(origin) != headers.get("host"):
            return refusal(403, f"a page of {origin[:100]} may not use this server", "open this server's own page")
        if int(headers.get("content-length") or 0) > most:
            return refusal(413, f"the body is longer than the limit of {most} bytes", "send a shorter body")
        if scope["type"] == "http" and scope["path"] in self._rules.pages and (token := _query_token(scope)):
            if not self._is_token(token):
                return refusal(
                    403, "the token in this address is not this server's", "open the address that it printed last"
                )
            return self._logged_in(scope["path"], token, headers)
        is_read = scope["type"] == "websocket" or scope.get("method") in _READS or not self._rules.writes_need_token
        if (self._is_open or not is_read) and not scope["state"]["may_control"]:
            fix = "open the address with ?token=... that the server printed, or send Authorization: Bearer TOKEN"
            return refusal(401, "this needs the token", fix)
        return None

    def _logged_in(self, path: str, token: str, headers: Headers) -> Response:
        """Redirect to the page, without the token in the address bar and the history."""
        response = RedirectResponse(path, 303)
        response.set_cookie(
            cookie_of(headers.get("host", "")), token, httponly=True, samesite="strict", secure=self._is_tls
        )
        return response

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(rest.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        # A browser gives one host's cookies to all its ports: so the dashboard may link to ps-serve.
        return any(name.startswith(_COOKIE) and self._is_token(found.value) for name, found in cookies.items())

    def _is_token(self, value: str) -> bool:
        found = [hmac.compare_digest(value.encode(), token.encode()) for token in self._tokens]  # constant time
        return any(found)


def cookie_of(host: str) -> str:
    """Returns the name of the cookie for this host and port."""
    port = host.rpartition(":")[2]
    return f"{_COOKIE}-{port}" if port.isascii() and port.isdigit() else _COOKIE


def _name_of(host: str) -> str:
    """Returns the host without its port, and `::1` for `[::1]`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _address_of(origin: str) -> str:
    """Returns host and port of an origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # an unbalanced bracket
        return ""


def _query_token(scope: Scope) -> str:
    return parse_qs(scope.get("query_string", b"").decode("ascii", "replace")).get("token", [""])[0]


def _with_headers(scope: Scope, send: Send) -> Send:
    """Add headers. The connection ends after a request that may have a body, so that its rest is not read."""
    headers = _HEADERS if scope.get("method") in _READS else [*_HEADERS, (b"connection", b"close")]

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *headers]
        await send(message)

    return sends


def _limited(receive: Receive, most_bytes: int) -> Receive:
    """Limit a body, also one of undeclared length."""
    taken = 0

    async def receives() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > most_bytes:
                return {"type": "http.disconnect"}
        return message

    return receives
