"""The worker's end of a direct connection in TLS, which two threads use and a third one ends."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramserver.common.config.schema import SecurityConfig
from paramserver.common.security import Credentials
from paramserver.common.wire.direct import ACCEPTED, HELLO, TICKET_BYTES, OutOfBand
from paramserver.launch.certs.kit import issue, make_ca
from paramserver.worker.conversation.direct import DirectConnection

NUM_BYTES = 4_000_000
PAYLOAD = bytes(range(250)) * (NUM_BYTES // 250)
WAIT_S = 20.0


def received(connection: ssl.SSLSocket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes and (piece := connection.recv(num_bytes - len(found))):
        found += piece
    return bytes(found)


@contextmanager
def connected(folder: Path) -> Iterator[tuple[DirectConnection, ssl.SSLSocket]]:
    """The worker's end, and a server's."""
    ca = make_ca("test")
    identity = issue(ca, "server", 1, ["127.0.0.1"])
    for name, pem in (("crt", identity.certificate_pem), ("key", identity.key_pem)):
        (folder / name).write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    servers: list[ssl.SSLSocket] = []

    def take(listening: socket.socket) -> None:
        bare, _ = listening.accept()
        servers.append(context.wrap_socket(bare, server_side=True))
        servers[0].settimeout(WAIT_S)
        received(servers[0], len(HELLO) + TICKET_BYTES)
        servers[0].sendall(ACCEPTED)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        taking = threading.Thread(target=take, args=(listening,))
        taking.start()
        trusted = Credentials(SecurityConfig(), ca=ca.certificate_pem)
        direct = DirectConnection(f"127.0.0.1:{port}", port, bytes(TICKET_BYTES), trusted)
        taking.join()
    try:
        yield direct, servers[0]
    finally:
        direct.close()
        servers[0].close()


class Alone:
    """OpenSSL's connection, and whether two threads were in it at once."""

    def __init__(self, inner: object) -> None:
        self._inner, self._num_inside, self.were_two = inner, 0, False

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in ("read", "write"):
            return found

        def called(*arguments: object) -> object:
            self._num_inside += 1
            self.were_two |= self._num_inside > 1
            try:
                return found(*arguments)
            finally:
                self._num_inside -= 1

        return called


def test_two_threads_are_never_in_one_tls_connection_and_neither_waits_for_the_other(tmp_path: Path) -> None:
    with connected(tmp_path) as (direct, server):
        alone = Alone(direct._socket._sslobj)  # type: ignore[attr-defined]
        direct._socket._sslobj = alone  # type: ignore[attr-defined]
        target = bytearray(NUM_BYTES)
        reading = threading.Thread(target=direct.receive_into, args=(iter([memoryview(target)]),), daemon=True)
        reading.start()
        frame = b"out_of_band"
        direct.send([OutOfBand(frame, [memoryview(PAYLOAD)])])  # while another thread waits to receive
        whole = len(frame).to_bytes(4, "little") + frame + PAYLOAD
        assert received(server, len(whole)) == whole
        server.sendall(PAYLOAD)
        reading.join(WAIT_S)
        assert not reading.is_alive() and target == PAYLOAD
        assert not alone.were_two


@pytest.mark.parametrize("ends", [DirectConnection.hang_up, DirectConnection.half_close])
def test_what_comes_after_the_end_is_no_payload(tmp_path: Path, ends: Callable[[DirectConnection], None]) -> None:
    """Another thread hangs up while a payload comes: what lies in the system's memory is encrypted, and no weights."""
    with connected(tmp_path) as (direct, server):
        server.sendall(PAYLOAD[:50_000])
        ends(direct)
        target = bytearray(50_000)
        with contextlib.suppress(EOFError, OSError):
            direct.receive_into(iter([memoryview(target)]))
        num_bytes = len(bytes(target).rstrip(b"\0"))
        assert target[:num_bytes] == PAYLOAD[:num_bytes]
