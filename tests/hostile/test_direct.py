"""Whoever comes to the direct port: without a ticket, with one that is used, foreign or too old, with lies about sizes,
or with nothing to say. Nobody else notices, and the streams go on over gRPC.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import pytest

from paramserver.common.wire.direct import ACCEPTED, HELLO
from paramserver.common.wire.frames import out_of_band_frame
from paramserver.proto import parameter_server_pb2 as pb

from .conftest import Peer, Server, contribution, contribution_header, join_bytes, model_bytes


def knock(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def welcomed(server: Server, rank: int | None = None) -> tuple[Any, pb.Direct]:
    peer = server.peer(rank)
    peer.send(join_bytes(rank))
    return peer, peer.receive("welcome").header.direct


def exchanges(server: Server, rank: int | None = None) -> Any:
    peer = server.peer(rank)
    peer.join()
    peer.contribute()
    assert peer.reply() == "APPLIED"
    return peer


def message(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def test_no_ticket_of_ours(server: Server) -> None:
    _, offered = welcomed(server)
    for data in (HELLO + os.urandom(32), b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(60), bytes(200)):
        assert is_closed(knock(offered.port, data))
    exchanges(server)


def test_a_ticket_is_good_once(server: Server) -> None:
    _, offered = welcomed(server)
    first = knock(offered.port, HELLO + offered.ticket)
    assert first.recv(1) == ACCEPTED
    assert is_closed(knock(offered.port, HELLO + offered.ticket))
    exchanges(server)


def test_a_ticket_is_for_the_stream_that_was_given_it(server: Server) -> None:
    """Another one says that it has gone direct: it has shown no ticket of its own."""
    item, offered = welcomed(server)
    other, _ = welcomed(server)
    assert knock(offered.port, HELLO + offered.ticket).recv(1) == ACCEPTED
    model = pb.WorkerMessage.FromString(model_bytes())
    model.model.direct = True
    other.send(model.SerializeToString())
    assert other.ended()[:2] == ("INVALID_ARGUMENT", "BAD_REQUEST")
    item.close()
    exchanges(server)


def test_a_ticket_ends_with_its_stream(server: Server) -> None:
    peer, offered = welcomed(server)
    taken = knock(offered.port, HELLO + offered.ticket)
    assert taken.recv(1) == ACCEPTED
    peer.close()
    assert is_closed(taken)
    assert is_closed(knock(offered.port, HELLO + offered.ticket))


@pytest.fixture
def direct(server: Server) -> Server:
    """Peers of it speak over direct connections."""
    server.transport = "direct"
    return server


def outside(offset: int) -> bytes:
    """A contribution whose bytes are to lie beyond it."""
    header = contribution_header(1, 0, in_shared_memory=True)
    announced = message(out_of_band_frame(offset, 1 << 30))
    return message(header.SerializeToString()) + announced + bytes(1 << 20)


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (struct.pack("<I", 2**32 - 1) + bytes(100), "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"),
        (struct.pack("<I", 9 << 20) + bytes(100), "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"),
        (message(b"\xff" * 40), "INVALID_ARGUMENT", "BAD_REQUEST"),  # no protobuf
        (outside(0), "INVALID_ARGUMENT", "BAD_REQUEST"),
        (outside(2**40), "INVALID_ARGUMENT", "BAD_REQUEST"),
    ],
    ids=["4 GiB", "9 MiB", "no protobuf", "too many bytes", "bytes elsewhere"],
)
def test_what_cannot_be_is_refused_with_a_reason(direct: Server, data: bytes, status: str, reason: str) -> None:
    peer: Any = direct.peer()
    peer.join()
    peer.raw(data)
    assert peer.ended()[:2] == (status, reason)
    exchanges(direct)


def test_one_that_closes_its_socket_and_not_its_stream(direct: Server) -> None:
    """Half of a worker is none: its stream ends, and its rank is free."""
    peer = exchanges(direct, 52)
    peer.socket.shutdown(socket.SHUT_RDWR)
    assert peer.ended()[0] in ("OK", "CANCELLED")
    exchanges(direct, 52)


def test_one_that_goes_on_over_the_stream(direct: Server) -> None:
    """What was left for the direct connection is read no more: nothing of it counts."""
    peer = exchanges(direct, 53)
    Peer.send(peer, *contribution(peer.seq + 1, peer.version))  # over gRPC
    peer.contribute()
    assert peer.reply() == "APPLIED"
    assert exchanges(direct, 54).version == peer.version + 1
