"""A direct connection that ends: who waits for it is told, and another one with its number is left alone."""

from __future__ import annotations

import asyncio
import socket

import pytest

from paramserver.ps.wire.direct import Connection


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
