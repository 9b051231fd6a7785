"""A direct connection that ends: who waits for it is told, and another one with its number is left alone. A port
that is shown a ticket too late, or in the wrong way."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.security import PLAINTEXT, Credentials
from paramserver.ps.wire import direct
from paramserver.ps.wire.direct import Connection, Port
from paramserver.worker.conversation.direct import Direct, DirectError

from ...certificates import certs


def pair() -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return Connection(ours), theirs


def test_who_waits_to_send_or_to_receive_is_told() -> None:
    async def play() -> None:
        connection, peer = pair()
        sending = asyncio.ensure_future(connection.send([bytes(16 << 20)]))  # more than the system takes
        reading = asyncio.ensure_future(connection.read())
        await asyncio.sleep(0)
        connection.close()
        for waiting in (sending, reading):
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(waiting, 5)
        peer.close()

    asyncio.run(play())


def test_a_second_close_leaves_the_next_connection_alone() -> None:
    """Its descriptor has the number that was free again."""

    async def play() -> None:
        old, old_peer = pair()
        number = old._descriptor
        old.close()
        new, new_peer = pair()
        while new._descriptor != number:  # the system gives the lowest that is free
            new, new_peer = pair()
        reading = asyncio.ensure_future(new.read())
        await asyncio.sleep(0)
        old.close()
        new_peer.sendall(b"\x02\x00\x00\x00hi")
        assert await asyncio.wait_for(reading, 5) == b"hi"
        old_peer.close()
        new.close()

    asyncio.run(play())


# ---- the port ---------------------------------------------------------------------------------------


def met(config: Config, arrive: Callable[[int, bytes], object]) -> bool:
    """Whether a ticket that `arrive(port, ticket)` shows, in a thread of its own, is taken."""

    async def play() -> bool:
        port = Port(config)
        port.bind()
        port.open()
        ticket = port.offer()
        assert ticket is not None
        try:
            await asyncio.to_thread(arrive, port.number, ticket.secret)
            return ticket.arrived.done()
        finally:
            ticket.drop()
            await port.close()

    return asyncio.run(play())


def config_of(**security: str) -> Config:
    return Config.model_validate({"server": {"listen": "127.0.0.1:0"}, "security": security})


def test_a_ticket_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrive(port: int, ticket: bytes) -> None:
        time.sleep(0.1)  # that time passes is what is tested
        with pytest.raises(DirectError, match="did not take the ticket"):
            Direct("127.0.0.1:1", port, ticket, PLAINTEXT)

    assert met(config_of(), lambda port, ticket: Direct("127.0.0.1:1", port, ticket, PLAINTEXT).close())
    monkeypatch.setattr(direct, "TICKET_S", 0.05)
    assert not met(config_of(), arrive)


def test_tls_against_plaintext_and_back(tmp_path: Path) -> None:
    """Neither is understood; the worker has its reason within a second, and goes over gRPC."""
    certs("init", tmp_path / "lab", "--workers", "1")
    ca, cert, key = (str(tmp_path / "lab" / name) for name in ("ca.crt", "server.crt", "server.key"))
    in_tls = Credentials(ca=Path(ca).read_bytes())

    def refused(credentials: Credentials) -> Callable[[int, bytes], None]:
        def arrive(port: int, ticket: bytes) -> None:
            with pytest.raises(DirectError, match=r"\(server.direct_port\): ") as failed:
                Direct("127.0.0.1:1", port, ticket, credentials)
            assert "\n" not in str(failed.value)

        return arrive

    assert not met(config_of(), refused(in_tls))
    assert not met(config_of(cert=cert, key=key), refused(PLAINTEXT))
    assert met(config_of(cert=cert, key=key), lambda port, ticket: Direct("127.0.0.1:1", port, ticket, in_tls).close())
