"""The limits of an HTTP server: each is for what a peer does, and one that is reached is said."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paramserver.common.config.schema import Config
from paramserver.tests.cluster import DEADLINE_S
from paramserver.tests.web.conftest import Client, until

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from paramserver.web import http
from paramserver.web.guard import Rules
from paramserver.web.http import HttpServer

Start = Callable[..., "Served"]


class Served:
    """An application whose replies wait for `may_reply`."""

    def __init__(self, rules: Rules) -> None:
        self.may_reply, self.num_begun = threading.Event(), 0
        self._http = HttpServer("127.0.0.1:0", Config(), rules, name="a test", flag="--listen")
        self.door = self._http.start(Starlette(routes=[Route("/", self._reply, methods=["GET", "POST"])]))
        self.address = self._http.address

    async def _reply(self, request: Request) -> Response:
        body = await request.body()
        self.num_begun += 1
        await asyncio.to_thread(self.may_reply.wait, DEADLINE_S)

        async def pieces() -> Any:
            yield b"first "
            await asyncio.to_thread(self.may_reply.wait, DEADLINE_S)
            yield body or b"whole"

        return StreamingResponse(pieces())

    def open(self, head: str = "GET / HTTP/1.1\r\n", end: str = "\r\n") -> socket.socket:
        return Client(self.address).connect(f"{head}Host: {self.address}\r\nConnection: close\r\n{end}")

    def close(self) -> None:
        self.may_reply.set()
        self._http.close()


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Served] = []

    def make(rules: Rules) -> Served:
        started.append(Served(rules))
        return started[-1]

    yield make
    for served in started:
        served.close()


def read(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of a reply."""
    with connection:
        head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_a_reply_has_as_much_time_as_the_application_needs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_IDLE_S", "_PROGRESS_S", "_CHECK_S"):
        monkeypatch.setattr(http, name, 0.05)
    served = start(Rules(writes_need_token=False, body_s=0.05))
    waiting = [served.open(), served.open("POST / HTTP/1.1\r\nContent-Length: 3\r\n", "\r\nabc")]
    until(lambda: served.num_begun == 2)
    later = time.monotonic() + 0.5  # ten times each limit
    until(lambda: time.monotonic() > later)
    served.may_reply.set()
    found = [read(connection) for connection in waiting]
    assert [status for status, _ in found] == [200, 200]
    assert b"whole" in found[0][1] and b"abc" in found[1][1]


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_that_comes_a_byte_at_a_time_is_408(start: Start, is_declared: bool) -> None:
    served = start(Rules(writes_need_token=False, body_s=0.2))
    length = "Content-Length: 60000" if is_declared else "Transfer-Encoding: chunked"
    slow = served.open(f"POST / HTTP/1.1\r\n{length}\r\n")
    slow.settimeout(0.02)

    def has_reply() -> bool:
        slow.sendall(b"x" if is_declared else b"1\r\nx\r\n")
        try:
            return bool(slow.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False

    until(has_reply)
    slow.settimeout(DEADLINE_S)
    status, body = read(slow)
    assert status == 408 and "within 0.2 s" in json.loads(body)["error"]


def test_a_request_beyond_all_connections_is_503(start: Start) -> None:
    served = start(Rules(max_connections=8))
    waiting = [served.open() for _ in range(served.door.max)]
    until(lambda: served.num_begun == len(waiting))
    status, body = read(served.open())
    assert status == 503 and "all 8 connections" in json.loads(body)["error"]
    served.may_reply.set()
    assert [read(connection)[0] for connection in waiting] == [200] * 8
