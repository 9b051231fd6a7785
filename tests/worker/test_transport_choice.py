"""Which transport a worker takes: the first of `worker.transports` that both sides can open, and why no better one; and
how it reaches the direct port."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from paramserver.common.config.schema import WorkerConfig
from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.common.wire.segments import new_segment
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.stream_client import connect
from paramserver.worker.transports.transport import Transports

NUM_BYTES = 1 << 20


def chosen(transports: str, why_not_direct: str = "", accepts: bool = True, **more: str) -> tuple[str, str]:
    """The transport of a worker on the server's host, and its reason."""
    probe = new_segment(4096)
    mine = Transports(WorkerConfig(transports=transports.split(","), **more))  # type: ignore[arg-type]
    mine.joined(pb.Welcome(probe=probe.address), why_not_direct)
    offered = mine.offer(pb.Model(), NUM_BYTES)
    if offered is not None:
        offered.decided(pb.SharedMemory(accepted=accepts, reason="" if accepts else "it will not"))
    mine.agreed()
    return mine.transport.name, mine.reason


@pytest.mark.parametrize(
    ("transports", "why_not_direct", "accepts", "expected"),
    [
        ("shared,direct,grpc", "", True, ("shared memory", "")),
        ("shared,direct,grpc", "no reply", True, ("shared memory", "")),
        ("shared,direct,grpc", "", False, ("direct", "shared memory: it will not")),
        ("shared,direct,grpc", "no reply", False, ("grpc", "shared memory: it will not; direct: no reply")),
        ("direct,shared,grpc", "", True, ("direct", "")),
        ("direct,shared,grpc", "no reply", True, ("shared memory", "direct: no reply")),
        ("direct,grpc", "", True, ("direct", "")),
        ("shared,grpc", "not wanted", False, ("grpc", "shared memory: it will not")),
        ("grpc", "not wanted", True, ("grpc", "")),
        ("grpc,shared,direct", "not wanted", True, ("grpc", "")),
    ],
)
def test_the_first_that_can_be_had(
    transports: str, why_not_direct: str, accepts: bool, expected: tuple[str, str]
) -> None:
    assert chosen(transports, why_not_direct, accepts) == expected


def test_a_codec_is_kept() -> None:
    assert chosen("shared,direct,grpc", codec="bf16") == ("direct", "shared memory: off (worker.codec is bf16)")


def transports_of(*sets: str, **environ: str) -> tuple[str, ...]:
    return load_config(None, {}, list(sets), environ).config.worker.wanted_transports


def test_how_they_are_said() -> None:
    assert transports_of() == ("shared", "direct", "grpc")
    assert (
        transports_of("worker.transports=[direct, grpc]")
        == transports_of(PS_WORKER__TRANSPORTS="direct,grpc")
        == ("direct", "grpc")
    )
    assert transports_of("worker.transports=grpc") == transports_of("worker.transports=grpc,shared") == ("grpc",)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("shared,direct", "grpc must be included"),
        ("direct,direct,grpc", "each transport at most once, got direct, direct, grpc"),
        ("tcp", "'shared', 'direct' or 'grpc'"),
    ],
)
def test_what_cannot_be_meant(message: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        transports_of(f"worker.transports={message}")
    assert "worker.transports" in refused.value.message


# ---- the way to a port ------------------------------------------------------------------------------


def test_one_address_after_another_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of several addresses, of which the last replies."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody listens
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", item.getsockname()) for item in (deaf, server)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(found))
        connect("several", 1, time.monotonic() + 1).close()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
        with pytest.raises(ConnectionRefusedError):
            connect("several", 1, time.monotonic() + 1)
    with pytest.raises(TimeoutError):
        connect("127.0.0.1", 1, time.monotonic())


@pytest.mark.parametrize(
    ("reply", "why"), [(b"200 OK", ""), (b"403 Forbidden", "the proxy says HTTP/1.1 403 Forbidden"), (b"", "proxy")]
)
def test_through_the_proxy_that_grpc_takes(monkeypatch: pytest.MonkeyPatch, reply: bytes, why: str) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as client:
                heard.append(client.recv(1000))
                if reply:
                    client.sendall(b"HTTP/1.1 " + reply + b"\r\n\r\nhello")

        threading.Thread(target=serve, daemon=True).start()
        for name in ("no_grpc_proxy", "no_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        if why:
            with pytest.raises(OSError, match=why):
                connect("far.away", 77, time.monotonic() + 5)
        else:
            with connect("far.away", 77, time.monotonic() + 5) as connection:
                assert connection.recv(5) == b"hello"
    assert heard == [b"CONNECT far.away:77 HTTP/1.1\r\nHost: far.away:77\r\n\r\n"]


def test_around_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "elsewhere, 127.0.0.1")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect("127.0.0.1", server.getsockname()[1], time.monotonic() + 5).close()
