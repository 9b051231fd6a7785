"""A direct connection that ends: who waits for it is told, and another one with its number is left alone. A port
that is shown a ticket too late, or in the wrong way."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.security import PLAINTEXT, Credentials
from paramserver.common.wire.direct import HELLO
from paramserver.launch.certs.kit import issue, make_ca
from paramserver.ps.wire import port as ports
from paramserver.ps.wire.connection import Connection
from paramserver.ps.wire.port import Port
from paramserver.worker.conversation.stream_client import DirectConnection, DirectError

from ...certificates import certs, secured, write


def pair(least: int = 0) -> tuple[Connection, socket.socket]:
    """`least`: the connection's descriptor has this number, or a higher one where this is not free."""
    ours, theirs = socket.socketpair()
    if least:
        moved = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, least))
        ours.close()
        ours = moved
    ours.setblocking(False)
    return Connection(ours), theirs


async def test_who_waits_to_send_or_to_receive_is_told() -> None:
    connection, peer = pair()
    sending = asyncio.ensure_future(connection.send([bytes(16 << 20)]))  # more than the system takes
    reading = asyncio.ensure_future(connection.read())
    await asyncio.sleep(0)
    connection.close()
    for waiting in (sending, reading):
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(waiting, 5)
    peer.close()


async def test_a_second_close_leaves_the_next_connection_alone() -> None:
    """Its descriptor has the number that was free again: one that no other thread of this process is given."""
    old, old_peer = pair(700)
    number = old._descriptor
    old.close()
    new, new_peer = pair(number)
    assert new._descriptor == number
    reading = asyncio.ensure_future(new.read())
    await asyncio.sleep(0)
    old.close()
    new_peer.sendall(b"\x02\x00\x00\x00hi")
    assert await asyncio.wait_for(reading, 5) == b"hi"
    old_peer.close()
    new.close()


# ---- TLS -------------------------------------------------------------------------------------------


class Guarded:
    """OpenSSL's connection, and for each use of it whether the lock of `connection` was held."""

    def __init__(self, inner: Any, connection: Connection) -> None:
        self._inner, self._connection = inner, connection
        self.uses: list[tuple[str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "write", "pending"):
            self.uses.append((name, self._connection._tls_lock.locked()))  # type: ignore[attr-defined]
        return getattr(self._inner, name)


def test_tls_is_used_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """OpenSSL allows no two, and Python keeps none out: a large reply may leave on a thread while a small message is
    read on the loop."""
    ca = make_ca("test")
    write(tmp_path, "server", issue(ca, "server", 1, ["127.0.0.1"]))
    context, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    trusting.load_verify_locations(cadata=ca.certificate_pem.decode())

    async def play() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        secure = context.wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
        connection = Connection(secure)
        shaking = asyncio.create_task(asyncio.to_thread(trusting.wrap_socket, theirs, server_hostname="127.0.0.1"))
        await connection.handshake()
        peer = await shaking
        secure._sslobj = guarded = Guarded(secure._sslobj, connection)
        come, readable = [], asyncio.Event()
        connection.watch(readable.set)
        peer.sendall(b"\x02\x00\x00\x00hi\x03\x00\x00\x00you")
        while len(come) < 2:
            if (message := connection.read_now()) is not None:
                come.append(message)
            else:
                await asyncio.wait_for(readable.wait(), 5)
                readable.clear()
        connection.unwatch()
        assert not connection.has_more
        connection.send_now([b"small"])
        assert peer.recv(5) == b"small" and come == [b"hi", b"you"]
        sending = asyncio.create_task(asyncio.to_thread(peer.sendall, bytes(MB)))
        await asyncio.wait_for(asyncio.gather(connection.receive_into(memoryview(bytearray(MB))), sending), 5)
        assert {name for name, _ in guarded.uses} == {"read", "write", "pending"}
        assert [name for name, is_alone in guarded.uses if not is_alone] == []
        connection.close()
        peer.close()

    asyncio.run(play())


# ---- large payloads ------------------------------------------------------------------------------------

MB = 1 << 20


def over_tcp() -> tuple[Connection, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    ours.setblocking(False)
    return Connection(ours), theirs


async def test_a_payload_in_pieces_less_than_one_is_woken_for() -> None:
    """What follows it is read as ever; and the end is seen at once."""
    connection, peer = over_tcp()
    payload, target = os.urandom(3 * MB + 5), bytearray(3 * MB + 5)

    def send() -> None:
        for at in range(0, len(payload), 300_001):
            peer.sendall(payload[at : at + 300_001])
        peer.sendall(b"\x02\x00\x00\x00hi")

    sending = asyncio.create_task(asyncio.to_thread(send))
    await asyncio.wait_for(connection.receive_into(memoryview(target)), 10)
    assert target == payload
    assert await asyncio.wait_for(connection.read(), 10) == b"hi"
    await sending
    reading = asyncio.ensure_future(connection.receive_some(memoryview(target)))
    await asyncio.sleep(0)
    peer.sendall(b"few")
    peer.close()
    assert await asyncio.wait_for(reading, 10) == 3
    assert await asyncio.wait_for(connection.receive_some(memoryview(target)), 10) == 0
    connection.close()


async def test_nothing_is_written_after_a_reception_was_cancelled() -> None:
    """Its memory is lent to another upload then."""
    connection, peer = over_tcp()
    target = bytearray(16 * MB)

    def send() -> None:
        with contextlib.suppress(OSError):
            peer.sendall(b"x" * (len(target) - 1))

    sending = asyncio.create_task(asyncio.to_thread(send))
    receiving = asyncio.ensure_future(connection.receive_into(memoryview(target)))
    while not target[0]:
        await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    target[:] = bytes(len(target))
    await asyncio.sleep(0.01)  # that nothing happens is what is tested
    assert target == bytes(len(target))
    connection.close()
    await sending
    peer.close()


async def test_nothing_is_read_after_a_sending_was_cancelled() -> None:
    """The next version is made there. What has left is as it was, in order."""
    connection, peer = over_tcp()
    weights = bytearray(b"x" * (16 * MB))
    sending = asyncio.ensure_future(connection.send([b"header", memoryview(weights)]))
    assert await asyncio.to_thread(peer.recv, 6) == b"header"
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    weights[:] = bytes(len(weights))
    connection.close()
    assert connection._socket.fileno() == -1

    def read() -> bytes:
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while more := peer.recv(MB):
                found += more
        return found

    found = await asyncio.to_thread(read)
    assert len(found) < len(weights)
    assert not found.strip(b"x")
    peer.close()


async def test_those_who_send_nothing_keep_no_other_waiting() -> None:
    """However many there are, and whatever they have announced."""
    silent = [over_tcp() for _ in range(12)]
    waiting = [asyncio.ensure_future(item.receive_into(memoryview(bytearray(MB)))) for item, _ in silent]
    for _, peer in silent:
        peer.sendall(b"x" * 1000)
    connection, peer = over_tcp()
    target = bytearray(8 * MB)
    sending = asyncio.create_task(asyncio.to_thread(peer.sendall, b"y" * len(target)))
    await asyncio.wait_for(connection.receive_into(memoryview(target)), 10)
    assert target == b"y" * len(target)
    await sending
    for number in waiting:
        number.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for number, other in [*silent, (connection, peer)]:
        number.close()
        other.close()


# ---- the port ---------------------------------------------------------------------------------------


def met(config: Config, arrive: Callable[[int, bytes], object], name: str | None = None) -> bool:
    """Whether a ticket for `name` that `arrive(port, ticket)` shows, in a thread of its own, is taken."""

    async def play() -> bool:
        port = Port(config)
        port.open()
        ticket = port.offer(name)
        assert ticket is not None
        try:
            await asyncio.to_thread(arrive, port.number, ticket.secret)
            return ticket.arrived.done()
        finally:
            ticket.drop()
            await port.close()

    return asyncio.run(play())


def config_of(**security: Any) -> Config:
    return Config.model_validate({"server": {"listen": "127.0.0.1:0"}, "security": security})


def test_a_ticket_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrive(port: int, ticket: bytes) -> None:
        time.sleep(0.1)  # that time passes is what is tested
        with pytest.raises(DirectError, match="did not take the ticket"):
            DirectConnection("127.0.0.1:1", port, ticket, PLAINTEXT)

    assert met(config_of(), lambda port, ticket: DirectConnection("127.0.0.1:1", port, ticket, PLAINTEXT).close())
    monkeypatch.setattr(ports, "TICKET_S", 0.05)
    assert not met(config_of(), arrive)


def test_tls_against_plaintext_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is understood; the worker has its reason within a second, and goes over gRPC."""
    certs("init", tmp_path / "lab", "--workers", "1")
    ca, cert, key = (str(tmp_path / "lab" / name) for name in ("ca.crt", "server.crt", "server.key"))
    in_tls = Credentials(ca=Path(ca).read_bytes())
    shake_hands, shaken_on = ssl.SSLSocket.do_handshake, set()

    def noted(self: ssl.SSLSocket, *args: Any) -> None:
        if self.server_side:
            shaken_on.add(threading.current_thread().name)
        shake_hands(self, *args)

    monkeypatch.setattr(ssl.SSLSocket, "do_handshake", noted)

    def refused(credentials: Credentials) -> Callable[[int, bytes], None]:
        def arrive(port: int, ticket: bytes) -> None:
            with pytest.raises(DirectError, match=r"\(server.direct_port\): ") as failed:
                DirectConnection("127.0.0.1:1", port, ticket, credentials)
            assert "\n" not in str(failed.value)

        return arrive

    assert not met(config_of(), refused(in_tls))
    assert not met(config_of(cert=cert, key=key), refused(PLAINTEXT))
    assert met(
        config_of(cert=cert, key=key),
        lambda port, ticket: DirectConnection("127.0.0.1:1", port, ticket, in_tls).close(),
    )
    assert shaken_on == {"handshake_0"}  # never the event loop's


def test_a_ticket_belongs_to_the_name_of_a_certificate(tmp_path: Path) -> None:
    """With mutual TLS: another worker's certificate, or none, does not do, and does not spoil it for whom it is for."""
    lab = tmp_path / "lab"
    certs("init", lab, "--workers", "2")
    names = {name: str(lab / file) for name, file in (("ca", "ca.crt"), ("cert", "server.crt"), ("key", "server.key"))}
    config = config_of(mutual=True, **names)
    of_both = [secured(lab, f"rank-{rank}", None) for rank in range(2)]

    def arrive(port: int, ticket: bytes) -> None:
        for wrong in (of_both[0], Credentials(ca=of_both[0].ca)):
            with pytest.raises(DirectError):
                DirectConnection("127.0.0.1:1", port, ticket, wrong)
        DirectConnection("127.0.0.1:1", port, ticket, of_both[1]).close()

    assert met(config, arrive, "rank-1")


def test_certificates_that_are_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections have the new one, and the old one, or none where there has been none, as long as the files do
    not fit together."""
    lab = tmp_path / "lab"
    certs("init", lab, "--workers", "1")
    cert, key = (str(lab / name) for name in ("server.crt", "server.key"))
    context = ssl.create_default_context(cafile=str(lab / "ca.crt"))

    def serial(port: int) -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            return str(context.wrap_socket(plain, server_hostname="127.0.0.1").getpeercert()["serialNumber"])

    def arrive(port: int, _: bytes) -> None:
        old_key = Path(key).read_bytes()
        Path(key).write_text("half of it")
        with pytest.raises(OSError):
            serial(port)
        Path(key).write_bytes(old_key)
        before = serial(port)
        Path(key).write_text("half of it")
        assert serial(port) == before
        Path(key).write_bytes(old_key)
        certs("init", lab, "--renew")
        assert serial(port) != before

    assert not met(config_of(cert=cert, key=key), arrive)
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelname == "ERROR"]


# ---- strangers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tls", [False, True])
def test_who_says_it_byte_by_byte_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_tls: bool
) -> None:
    """The time is for all of it: a hello, or a handshake."""
    monkeypatch.setattr(ports, "_HELLO_S", 0.3)
    names = {}
    if is_tls:
        certs("init", tmp_path / "lab", "--workers", "1")
        names = {name: str(tmp_path / "lab" / f"server.{end}") for name, end in (("cert", "crt"), ("key", "key"))}
    data = iter(b"\x16\x03\x01\x01\x00\x01" + bytes(1000) if is_tls else HELLO + bytes(32))

    def arrive(port: int, _: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.settimeout(0.05)
            for byte in data:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    slow.sendall(bytes([byte]))
                    if slow.recv(1) == b"":
                        break
            assert next(data, None) is not None, "it was heard out"

    assert not met(config_of(**names), arrive)


def test_no_descriptors_are_left(capfd: pytest.CaptureFixture[str]) -> None:
    """Who waits is let in when there are some again, and the oldest stranger makes room."""

    def arrive(port: int, ticket: bytes) -> None:
        silent = socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises(DirectError):
            DirectConnection("127.0.0.1:1", port, bytes(32), PLAINTEXT)  # the silent one has been let in before
        late = [socket.socket() for _ in range(2)]
        was, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), most))
        with contextlib.suppress(OSError):
            while True:
                late.append(late[0].dup())
        try:
            for number in late[:2]:
                number.connect(("127.0.0.1", port))
            assert silent.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (was, most))
        DirectConnection("127.0.0.1:1", port, ticket, PLAINTEXT).close()
        for number in (silent, *late):
            number.close()

    assert met(config_of(), arrive)
    assert "direct_not_accepted" in "".join(capfd.readouterr())


# ---- the worker's end -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_made_ends_the_connection() -> None:
    """A payload comes of a generator, on a thread of its own: whoever waits for the reply is told."""

    def payload() -> Iterator[bytes]:
        yield b"its beginning"
        raise MemoryError

    def arrive(port: int, ticket: bytes) -> None:
        connection = DirectConnection("127.0.0.1:1", port, ticket, PLAINTEXT)
        connection._socket.settimeout(5)
        connection.send(payload())
        with pytest.raises(EOFError):
            connection.receive()
        connection.close()

    assert met(config_of(), arrive)
