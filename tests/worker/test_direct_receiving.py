"""The worker's end of a direct connection, and a server that sends a payload in pieces; in TLS, two threads use the
connection, and a third one ends it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import ssl
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.common.config.schema import SecurityConfig
from paramserver.common.security import Credentials
from paramserver.common.wire.direct import ACCEPTED, HELLO, TICKET_BYTES, WAKE_BYTES, OutOfBand
from paramserver.launch.certs.kit import issue, make_ca
from paramserver.worker.conversation.stream_client import DirectConnection
from paramserver.worker.transports.limit import NO_LIMIT, Limit

from ..certificates import write

NUM_BYTES = 600_000
WAIT_S = 20.0


def num_unread(connection: socket.socket) -> int:
    """Bytes that have come and nobody has taken."""
    found = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, found)
    return found[0]


def received(connection: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes and (piece := connection.recv(num_bytes - len(found))):
        found += piece
    return bytes(found)


def connected(limit: Limit = NO_LIMIT, folder: Path | None = None) -> tuple[DirectConnection, socket.socket]:
    """A worker's end and the server's; with a `folder` for certificates, in TLS."""
    context, credentials = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Credentials()
    if folder is not None:
        ca = make_ca("test")
        write(folder, "server", issue(ca, "server", 1, ["127.0.0.1"]))
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        credentials = Credentials(SecurityConfig(), ca=ca.certificate_pem)
    accepted: list[socket.socket] = []

    def take(listening: socket.socket) -> None:
        server, _ = listening.accept()
        accepted.append(server if folder is None else context.wrap_socket(server, server_side=True))
        accepted[0].settimeout(WAIT_S)
        received(accepted[0], len(HELLO) + TICKET_BYTES)
        accepted[0].sendall(ACCEPTED)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        taking = threading.Thread(target=take, args=(listening,))
        taking.start()
        direct = DirectConnection(f"127.0.0.1:{port}", port, bytes(TICKET_BYTES), credentials, limit)
        taking.join()
    return direct, accepted[0]


def receiving(direct: DirectConnection, target: bytearray) -> threading.Thread:
    thread = threading.Thread(target=direct.receive_into, args=(iter([memoryview(target)]),), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("first", [1, 100_000, 400_000, NUM_BYTES - 1])
def test_a_payload_of_which_some_came_before_the_rest(first: int) -> None:
    """A thread that waits for the rest is woken, however little that is."""
    direct, server = connected()
    payload = os.urandom(NUM_BYTES).replace(b"\0", b"\1")  # a zero byte has not been received
    target = bytearray(NUM_BYTES)
    thread = receiving(direct, target)
    server.sendall(payload[:first])
    deadline = time.monotonic() + WAIT_S
    while NUM_BYTES - target.count(0) + num_unread(direct._socket) < first:
        assert time.monotonic() < deadline
    server.sendall(payload[first:])
    thread.join(WAIT_S)
    assert target == payload
    direct.close()
    server.close()


def test_a_poll_that_returns_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel's does when it is short of memory. The last bytes alone wake no thread that sleeps in recv."""
    direct, server = connected()
    monkeypatch.setattr(direct, "_wait", lambda _: None)
    payload = os.urandom(WAKE_BYTES + 700)
    target = bytearray(len(payload))
    thread = receiving(direct, target)
    server.sendall(payload[:-1000])
    deadline = time.monotonic() + WAIT_S
    while target[:-1000] != payload[:-1000] and time.monotonic() < deadline:
        pass
    server.sendall(payload[-1000:])
    thread.join(WAIT_S)
    assert target == payload
    direct.close()
    server.close()


def test_in_tls_a_thread_that_sends_does_not_wait_for_one_that_receives(tmp_path: Path) -> None:
    """Neither holds the lock of the connection while it waits (`tests/ps/wire/test_direct_connection.py`)."""
    direct, server = connected(folder=tmp_path)
    payload = os.urandom(4_000_000)
    target = bytearray(len(payload))
    thread = receiving(direct, target)
    frame = b"out_of_band"
    direct.send([OutOfBand(frame, [memoryview(payload)])])  # while another thread waits to receive
    whole = len(frame).to_bytes(4, "little") + frame + payload
    assert received(server, len(whole)) == whole
    server.sendall(payload)
    thread.join(WAIT_S)
    assert target == payload
    direct.close()
    server.close()


@pytest.mark.parametrize("ends", [DirectConnection.hang_up, DirectConnection.half_close])
def test_what_comes_after_the_end_is_no_payload(tmp_path: Path, ends: Callable[[DirectConnection], None]) -> None:
    """Another thread hangs up while a payload comes: what lies in the system's memory is encrypted, and no weights."""
    direct, server = connected(folder=tmp_path)
    payload, target = bytes(range(250)) * 200, bytearray(50_000)
    server.sendall(payload)
    ends(direct)
    with contextlib.suppress(EOFError, OSError):
        direct.receive_into(iter([memoryview(target)]))
    num_bytes = len(bytes(target).rstrip(b"\0"))
    assert target[:num_bytes] == payload[:num_bytes]
    direct.close()
    server.close()
