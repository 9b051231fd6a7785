"""Attacks on the page over real sockets: other pages, other names, wrong tokens, too much of everything."""

from __future__ import annotations

import asyncio
import hashlib
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import jsonschema
import pytest

from paramserver.common.reporting.summary import EvaluatedPoint, Event, Snapshot, Span, Wait
from paramserver.tests.cluster import DEADLINE_S, Cluster
from paramserver.tests.web.conftest import CONTROL, SHOWN, Client, tick, until

pytest.importorskip("starlette", reason="pip install 'paramserver[web]'")

from paramserver.web.guard import cookie_of


@pytest.mark.parametrize(
    "other", ['a[b]="x, y"', 'json={"a":1}', "=", "\xe9=\xff", "paramserver-1=theirs", "x=" + "y" * 20_000]
)
def test_a_cookie_of_another_program_changes_nothing(client: Client, asked: list[dict[str, Any]], other: str) -> None:
    order, ours = json.dumps({"do": "drain"}).encode(), f"{cookie_of(client.address)}=secret"
    for cookies in (f"{other}; {ours}", f"{ours}; {other}"):
        assert client.ask("POST", CONTROL, order, Origin=f"http://{client.address}", Cookie=cookies)[0] == 200
    assert len(asked) == 2


def test_who_may_change_something(client: Client, asked: list[dict[str, Any]]) -> None:
    order, ours = json.dumps({"do": "drain"}).encode(), f"http://{client.address}"
    assert client.ask("POST", CONTROL, order)[0] == 401
    assert client.ask("POST", CONTROL, order, Authorization="Bearer wrong")[0] == 401
    assert client.ask("POST", CONTROL, order, Cookie=f"{cookie_of(client.address)}=wrong")[0] == 401
    cookie = {"Cookie": f"{cookie_of(client.address)}=secret"}
    assert client.ask("POST", CONTROL, order, Origin="http://evil.example", **cookie)[0] == 403
    for nobody in ("null", "http://[", "http://[::1", ""):
        assert client.ask("POST", CONTROL, order, Origin=nobody, **SHOWN)[0] == 403
    assert client.ask("POST", CONTROL, order, Host="evil.example", **SHOWN)[0] == 421
    assert client.ask("GET", "/api/runs", Host="evil.example:80")[0] == 421
    assert client.ask("GET", "/?token=wrong")[0] == 403
    for method in ("PUT", "DELETE", "PATCH"):
        assert client.ask(method, CONTROL, order)[0] == 401
    assert not asked
    assert client.ask("POST", CONTROL, order, Origin=ours, **cookie) == (200, {"done": "done"})
    assert client.ask("POST", CONTROL, order, **SHOWN)[0] == 200
    assert asked == [{"do": "drain"}] * 2


def test_bodies_that_are_none(client: Client, asked: list[dict[str, Any]]) -> None:
    for body in (b"", b"[]", b"{", b"nul", b"\xff\xfe"):
        status, reply = client.ask("POST", CONTROL, body, **SHOWN)
        assert (status, reply["error"]) == (400, "the body is not a JSON object")
    status, reply = client.ask("POST", CONTROL, b"{}", Content_Length=str(1 << 30), **SHOWN)
    assert status == 413 and "65536 bytes" in reply["error"]
    assert not asked


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_client_that_sends_all_of_its_body_reads_the_refusal(client: Client, is_declared: bool) -> None:
    """As most clients do, before they read. The connection is not closed while they send."""
    body = b"x" * (4 << 20)
    length = f"Content-Length: {len(body)}" if is_declared else "Transfer-Encoding: chunked"
    with client.connect() as connection:
        head = f"POST {CONTROL} HTTP/1.1\r\nHost: {client.address}\r\nAuthorization: Bearer secret\r\n{length}\r\n\r\n"
        connection.sendall(head.encode() + (b"" if is_declared else f"{len(body):x}\r\n".encode()) + body[:200_000])
        select.select([connection], [], [], DEADLINE_S)  # the reply is there
        connection.sendall(body[200_000:] + (b"" if is_declared else b"\r\n0\r\n\r\n"))
        reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert reply.startswith(b"HTTP/1.1 413 ") and b"limit of 65536 bytes" in reply


def test_a_gigabyte_that_does_not_say_how_long_it_is(client: Client) -> None:
    """Sent in chunks: the connection is closed long before all of it was taken."""
    head = f"POST {CONTROL} HTTP/1.1\r\nHost: {client.address}\r\nAuthorization: Bearer secret\r\n"
    with client.connect(f"{head}Transfer-Encoding: chunked\r\n\r\n") as connection:
        chunk, sent = b"10000\r\n" + b"x" * 0x10000 + b"\r\n", 0
        with suppress(ConnectionError):
            while sent < 1 << 30:
                connection.sendall(chunk)
                sent += len(chunk)
        assert sent < 1 << 28
    assert client.ask("GET", "/api/health")[0] == 200


@pytest.mark.parametrize("path", ["/static/../serve.py", "/static/%2e%2e/serve.py", "/static/..%2f..%2fpyproject.toml"])
def test_no_way_out_of_the_folder(client: Client, path: str) -> None:
    assert client.ask("GET", path)[0] == 404


def test_a_page_has_its_style_and_what_has_not_changed_is_not_sent_again(client: Client) -> None:
    style = client.ask("GET", "/static/style.css")[1]
    for path in ("/", "/runs"):
        status, page = client.ask("GET", path)
        assert (status, style in page, b"/static/style.css" in page) == (200, True, False)
        tag = f'"{hashlib.sha256(page).hexdigest()[:16]}"'
        assert client.ask("GET", path, If_None_Match=tag) == (304, b"")
        assert client.ask("GET", path, If_None_Match='"another"') == (200, page)


def test_a_run_that_is_not_there(client: Client) -> None:
    assert client.ask("GET", "/api/runs/nope/status") == (404, {"error": "no run nope; there are: r1", "fix": ""})


def test_everything_is_described(page: Any, client: Client) -> None:
    """Each path of the description answers, and what it answers, refusals too, is as described."""
    happened = [Event(at=1.7e9, kind="left", text="worker 1 is gone", rank=1)]
    point = EvaluatedPoint(step=2, version=2, metrics={"accuracy": 0.5})
    page.push(
        tick(2, events=happened, waits=[Wait(rank=0, why="w")], spans=[Span(rank=0, begin_s=1.0)], evaluations=[point],
             snapshots=[Snapshot(version=2, at=1.7e9, path="snapshots/2")])
    )  # fmt: skip
    until(lambda: client.ask("GET", "/api/runs/r1/snapshots")[1] != [])
    described = client.ask("GET", "/api/openapi.json")[1]
    assert described["openapi"].startswith("3.1")

    def is_as_described(answer: tuple[int, Any], path: str, method: str = "get") -> None:
        status, content = answer
        of = described["paths"][path][method]["responses"][str(status)]
        (kind,) = of["content"].values()
        schema = {**kind["schema"], "components": described["components"]}
        jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)

    order = json.dumps({"do": "drain"}).encode()
    for path, methods in described["paths"].items():
        if "get" in methods and "events" not in path.removeprefix("/api/runs/{run}") and "{rank}" not in path:
            asked = path.replace("{run}", "live") + ("?runs=r1" if path == "/api/compare" else "")
            answer = client.ask("GET", asked)
            assert answer[0] == 200, path
            is_as_described(answer, path)
            is_as_described(client.ask("GET", asked, Host="evil.example"), path)
            is_as_described(client.ask("GET", asked, Origin="http://evil.example"), path)
    is_as_described(client.ask("GET", "/api/runs/nope/status"), "/api/runs/{run}/status")
    control = "/api/runs/{run}/controls"
    for answer, status in (
        (client.ask("POST", CONTROL, order, **SHOWN), 200),
        (client.ask("POST", CONTROL, order), 401),
        (client.ask("POST", CONTROL, b"[]", **SHOWN), 400),
        (client.ask("POST", CONTROL, b"{}", Content_Length=str(1 << 30), **SHOWN), 413),
    ):
        assert answer[0] == status
        is_as_described(answer, control, "post")
    page.push(tick(3, is_over=True))
    messages = events_of(client)
    assert [message["event"] for message in messages] == ["whole", "over"]
    for item in messages:
        is_as_described((200, item), "/api/events")
    is_as_described((200, {"event": "tick", "number": 3, "data": messages[0]["data"]["newest"]}), "/ws/events")
    is_as_described(client.ask("POST", CONTROL, order, **SHOWN), control, "post")
    with pytest.raises(jsonschema.ValidationError):  # the schemas are not such as take anything
        is_as_described((200, {"event": "tick", "number": 3, "data": {}}), "/ws/events")


def events_of(client: Client) -> list[dict[str, Any]]:
    """All messages of the stream, of a run that is over."""
    lines = client.ask("GET", "/api/events")[1].decode().splitlines()
    texts = [line.partition(": ")[2] for line in lines if line]
    return [
        {"event": kind, "number": int(number), "data": json.loads(data)}
        for kind, number, data in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]


def test_the_log_has_no_token(cluster: Cluster) -> None:
    """It is kept and sent on; the terminal alone has the address that gives orders."""
    flags = ("-m", "paramserver.ps", "--listen", "127.0.0.1:0", "--web", "127.0.0.1:0")
    for kind, count in (("json", 0), ("text", 1)):
        server = cluster.start(kind, *flags, PS_LOG__FORMAT=kind, PS_WEB_TOKEN="secret")
        server.until(lambda server=server: "listening" in server.output, "listening")
        assert server.output.count("secret") == count
        assert ("the dashboard: http://127.0.0.1:" in server.output) == bool(count)


@pytest.fixture
def viewers(client: Client) -> Iterator[Any]:
    with ExitStack() as stack:

        def looks(path: str = "/api/events") -> socket.socket:
            return stack.enter_context(client.connect(f"GET {path} HTTP/1.1\r\nHost: {client.address}\r\n\r\n"))

        yield looks


def test_100_viewers(client: Client, viewers: Any) -> None:
    heads = [viewers().recv(12) for _ in range(100)]
    assert heads.count(b"HTTP/1.1 200") == 32
    assert heads.count(b"HTTP/1.1 503") == 68
    assert client.ask("GET", "/api/health")[1]["viewers"] == 32


def test_a_viewer_that_never_reads_holds_up_nobody(page: Any, client: Client, viewers: Any) -> None:
    viewers()
    reader = viewers().makefile("rb")
    pushed = 0
    for pushed in range(3, 303):  # 64 workers, some 30 KB each: more than sockets hold
        page.push(tick(pushed, 64))
    until_step(reader, pushed)
    began = time.monotonic()
    page.close()
    assert time.monotonic() - began < 10


def until_step(lines: Any, step: int) -> None:
    for line in lines:
        if line.startswith(b"data:"):
            event = json.loads(line[5:])
            if (event.get("newest") or event)["status"]["step"] == step:
                return
    raise AssertionError(f"the stream ended before step {step}")


def test_live_over_a_websocket(page: Any, client: Client) -> None:
    websockets = pytest.importorskip("websockets")

    async def look() -> list[str]:
        found = []
        async with websockets.connect(f"ws://{client.address}/ws/events", max_size=1 << 24) as connection:
            found.append(json.loads(await connection.recv())["event"])
            page.push(tick(2))
            found.append(json.loads(await connection.recv())["event"])
            page.push(tick(3, is_over=True))
            found += [json.loads(message)["event"] async for message in connection]
        return found

    assert asyncio.run(look()) == ["whole", "tick", "tick", "over"]

    async def from_elsewhere() -> None:
        async with websockets.connect(f"ws://{client.address}/ws/events", origin="http://evil.example"):
            pass

    with pytest.raises(websockets.exceptions.InvalidStatus):
        asyncio.run(from_elsewhere())


def test_an_open_address_needs_tls_and_a_token(cluster: Cluster) -> None:
    result = cluster.command("ps", "--listen", "127.0.0.1:0", "--web", "0.0.0.0:0")
    assert result.returncode == 11
    assert "the dashboard at 0.0.0.0:0 can be reached by other machines, and the connection is neither" in result.stderr


def test_on_a_network_one_trusts_all_needs_the_token(cluster: Cluster) -> None:
    server = cluster.server("--web", "0.0.0.0:0", "--insecure", PS_WEB_TOKEN="secret")
    client = Client(server.event("dashboard")["address"].replace("0.0.0.0", "127.0.0.1"))
    assert client.ask("GET", "/api/runs")[0] == client.ask("GET", "/")[0] == 401
    assert client.ask("GET", "/api/runs", Authorization="Bearer secret")[0] == 200
    # The cookie of the dashboard, which links to ps-serve at another port.
    assert client.ask("GET", "/api/runs", Cookie=f"{cookie_of('host:1')}=secret")[0] == 200
    assert client.ask("GET", "/api/runs", Cookie=f"{cookie_of('host:1')}=wrong; other=secret")[0] == 401


def test_a_port_that_is_taken(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = cluster.command("ps", "--listen", "127.0.0.1:0", "--web", f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.returncode == 10
    assert "for the dashboard: Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_page_its_packages_are_not_loaded(cluster: Cluster) -> None:
    code = "import sys, paramserver.ps.server; print([one for one in ('starlette', 'uvicorn') if one in sys.modules])"
    process = cluster.start("python", "-c", code)
    assert process.wait() == 0
    assert process.output.endswith("[]\n")
