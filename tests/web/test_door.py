"""Connections without end to the page of a real server: the run loses nothing, and whoever asks is answered."""

from __future__ import annotations

import http.client
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.security import WEB_TOKEN_VARIABLE
from paramserver.tests.certificates import certs
from paramserver.tests.cluster import DEADLINE_S, Cluster, Process
from paramserver.tests.web.conftest import CONTROL, SHOWN, Client, served, tick, until

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")

from paramserver.web import http as web_http
from paramserver.web.guard import Rules

NUM_IDLE = 2000


@pytest.fixture
def idle() -> Iterator[Callable[..., socket.socket]]:
    """Opens connections that are closed at the end; this process may have more than the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:

        def connected(address: str, data: bytes = b"") -> socket.socket:
            return stack.enter_context(Client(address).connect(data))

        yield connected
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limited(cluster: Cluster, most: int, *flags: str, **env: str) -> Process:
    """A real ps-server with a page that may have `most` descriptors."""
    code = (
        f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most})); "
        "sys.argv[0] = 'ps-server'; runpy.run_module('paramserver.ps', run_name='__main__')"
    )
    where = ("--listen", "127.0.0.1:0", "--web", "127.0.0.1:0")
    server = cluster.start("server", "-c", code, *where, *flags, PS_WEB_TOKEN="secret", **env)
    cluster.address = server.event("listening")["address"]
    return server


def is_closed(item: socket.socket) -> bool:
    """The page has ended it."""
    item.setblocking(False)
    try:
        return item.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def num_open(those: list[socket.socket]) -> int:
    return sum(not is_closed(item) for item in those)


def test_idle_connections_give_way_and_who_looks_stays(
    page: Any, client: Client, idle: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = f"GET /api/events HTTP/1.1\r\nHost: {client.address}\r\n\r\n".encode()
    viewer = idle(client.address, head)
    assert viewer.recv(12) == b"HTTP/1.1 200"
    those = [idle(client.address, data) for data in (b"", b"GET / HTTP/1.1\r\n") for _ in range(200)]
    assert client.ask("GET", "/api/health")[1]["viewers"] == 1
    until(lambda: num_open(those) < Rules().max_connections)
    monkeypatch.setattr(web_http, "_IDLE_S", 0.1)
    assert client.ask("POST", CONTROL, b'{"do": "drain"}', **SHOWN)[0] == 200
    late = [idle(client.address) for _ in range(20)]
    until(lambda: num_open(late) == 0)
    assert not is_closed(viewer)


@pytest.mark.parametrize("of", ["headers", "the next headers"])
def test_a_byte_at_a_time_is_too_slow(
    client: Client, idle: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setattr(web_http, "_IDLE_S", 0.5)
    slow = idle(client.address)
    if of == "the next headers":
        slow.sendall(f"GET /api/health HTTP/1.1\r\nHost: {client.address}\r\n\r\n".encode())
        assert slow.recv(12) == b"HTTP/1.1 200"
        slow.recv(1 << 16)

    def one_more() -> bool:
        with suppress(OSError):
            slow.send(b"x")
        return is_closed(slow)

    until(one_more)


def test_who_takes_no_bytes_is_no_viewer_any_more(
    page: Any, client: Client, idle: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_http, "_PROGRESS_S", 0.5)
    for path, more in (("/api/events", ""), ("/ws/events", UPGRADE)):
        idle(client.address, f"GET {path} HTTP/1.1\r\nHost: {client.address}\r\n{more}\r\n".encode())
    until(lambda: client.ask("GET", "/api/health")[1]["viewers"] == 2)
    number = iter(range(2, 100_000))

    def is_left() -> bool:
        page.push(tick(next(number), 64))
        return client.ask("GET", "/api/health")[1]["viewers"] == 0

    until(is_left)


UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def test_who_answers_no_ping_is_no_viewer_any_more(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, idle: Callable[..., socket.socket]
) -> None:
    monkeypatch.setattr(web_http, "_PING_S", 0.2)
    client = request.getfixturevalue("client")
    silent = idle(client.address, f"GET /ws/events HTTP/1.1\r\nHost: {client.address}\r\n{UPGRADE}\r\n".encode())
    until(lambda: client.ask("GET", "/api/health")[1]["viewers"] == 1)
    until(lambda: is_closed(silent))
    until(lambda: client.ask("GET", "/api/health")[1]["viewers"] == 0)


def test_pings_without_end_take_bounded_memory(client: Client, idle: Callable[..., socket.socket]) -> None:
    """Their answers are not read."""
    sender = idle(client.address, f"GET /ws/events HTTP/1.1\r\nHost: {client.address}\r\n{UPGRADE}\r\n".encode())
    until(lambda: client.ask("GET", "/api/health")[1]["viewers"] == 1)
    pings, sent = (b"\x89\xfd" + bytes(4) + bytes(125)) * 1000, 0
    with suppress(OSError):
        while sent < 1 << 30:
            sender.sendall(pings)
            sent += len(pings)
    assert sent < 1 << 28


def test_silence_instead_of_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, idle: Callable[..., socket.socket]
) -> None:
    certs("init", tmp_path / "certs")
    folder = tmp_path / "certs"
    security = {"ca": f"{folder}/ca.crt", "cert": f"{folder}/server.crt", "key": f"{folder}/server.key"}
    monkeypatch.setenv(WEB_TOKEN_VARIABLE, "secret")
    with served(tmp_path, **security) as page:
        those = [idle(page.address) for _ in range(300)]
        host, _, port = page.address.rpartition(":")
        connection = http.client.HTTPSConnection(
            host, int(port), timeout=DEADLINE_S, context=ssl.create_default_context(cafile=f"{folder}/ca.crt")
        )
        connection.request("GET", "/api/health")
        assert connection.getresponse().status == 200
        connection.close()
        until(lambda: num_open(those) < Rules().max_connections)


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: "], ids=["silent", "half a request"])
def test_2000_idle_connections_cost_no_join_and_no_snapshot(
    cluster: Cluster, idle: Callable[..., socket.socket], data: bytes
) -> None:
    flags = ("--mode", "async", "--task", "xor", "--steps", "100000", "--checkpoint-dir", "snapshots")
    server = limited(cluster, 1024, *flags)
    page = Client(server.event("dashboard")["address"])
    for _ in range(NUM_IDLE):
        idle(page.address, data)
    worker = cluster.worker(0)
    server.until(lambda: bool(server.events("admitted")), "worker")
    assert page.ask("POST", CONTROL, b'{"do": "snapshot"}', **SHOWN)[0] == 200
    server.until(lambda: len(page.ask("GET", "/api/runs/live/snapshots")[1]) > 1, "snapshot")
    late = cluster.worker(1)
    server.until(lambda: len(server.events("admitted")) == 2, "second worker")
    assert page.ask("POST", CONTROL, b'{"do": "drain"}', **SHOWN)[0] == 200
    assert [process.wait() for process in (worker, late, server)] == [0, 0, 0], server.output
    assert "Too many open files" not in server.output
