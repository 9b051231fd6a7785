"""The worker's end of a direct connection, and a server that sends a payload in pieces."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
import threading
import time

import pytest

from paramserver.common.security import Credentials
from paramserver.common.wire.direct import ACCEPTED, HELLO, TICKET_BYTES, WAKE_BYTES
from paramserver.worker.conversation.direct import DirectConnection
from paramserver.worker.transports.limit import NO_LIMIT, Limit

NUM_BYTES = 600_000


def num_unread(connection: socket.socket) -> int:
    """Bytes that have come and nobody has taken."""
    found = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, found)
    return found[0]


def connected(limit: Limit = NO_LIMIT) -> tuple[DirectConnection, socket.socket]:
    """A worker's end and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def take() -> None:
            server, _ = listening.accept()
            server.recv(len(HELLO) + TICKET_BYTES, socket.MSG_WAITALL)
            server.sendall(ACCEPTED)
            accepted.append(server)

        accepted: list[socket.socket] = []
        taking = threading.Thread(target=take)
        taking.start()
        direct = DirectConnection(f"127.0.0.1:{port}", port, bytes(TICKET_BYTES), Credentials(), limit)
        taking.join()
    return direct, accepted[0]


@pytest.mark.parametrize("first", [1, 100_000, 400_000, NUM_BYTES - 1])
def test_a_payload_of_which_some_came_before_the_rest(first):
    """A thread that waits for the rest is woken, however little that is."""
    direct, server = connected()
    payload = os.urandom(NUM_BYTES).replace(b"\0", b"\1")  # a zero byte has not been received
    received = bytearray(NUM_BYTES)
    receiving = threading.Thread(target=direct.receive_into, args=(iter([memoryview(received)]),), daemon=True)
    receiving.start()
    server.sendall(payload[:first])
    deadline = time.monotonic() + 10
    while NUM_BYTES - received.count(0) + num_unread(direct._socket) < first:
        assert time.monotonic() < deadline
    server.sendall(payload[first:])
    receiving.join(10)
    assert not receiving.is_alive()
    assert received == payload
    direct.close()
    server.close()


def test_a_poll_that_returns_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel's does when it is short of memory. The last bytes alone wake no thread that sleeps in recv."""
    direct, server = connected()
    monkeypatch.setattr(direct, "_wait", lambda _: None)
    payload = os.urandom(WAKE_BYTES + 700)
    received = bytearray(len(payload))
    receiving = threading.Thread(target=direct.receive_into, args=(iter([memoryview(received)]),), daemon=True)
    receiving.start()
    server.sendall(payload[:-1000])
    deadline = time.monotonic() + 10
    while received[:-1000] != payload[:-1000] and time.monotonic() < deadline:
        pass
    server.sendall(payload[-1000:])
    receiving.join(10)
    assert not receiving.is_alive()
    assert received == payload
    direct.close()
    server.close()
