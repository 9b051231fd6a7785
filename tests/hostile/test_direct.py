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


def shows_it_works(server: Server) -> None:
    peer = server.peer()
    peer.join()
    peer.contribute()
    assert peer.reply() == "APPLIED"


def message(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def test_no_ticket_of_ours(server: Server) -> None:
    _, offered = welcomed(server)
    for data in (HELLO + os.urandom(32), b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(60), bytes(200)):
        assert is_closed(knock(offered.port, data))
    shows_it_works(server)


def test_a_ticket_is_good_once(server: Server) -> None:
    _, offered = welcomed(server)
    first = knock(offered.port, HELLO + offered.ticket)
    assert first.recv(1) == ACCEPTED
    assert is_closed(knock(offered.port, HELLO + offered.ticket))
    shows_it_works(server)


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
    shows_it_works(server)


def test_a_ticket_ends_with_its_stream(server: Server) -> None:
    peer, offered = welcomed(server)
    taken = knock(offered.port, HELLO + offered.ticket)
    assert taken.recv(1) == ACCEPTED
    peer.close()
    assert is_closed(taken)
    assert is_closed(knock(offered.port, HELLO + offered.ticket))


def direct_peer(server: Server) -> tuple[Any, socket.socket]:
    """One that is through with joining: initial weights brought, replied, all over the socket."""
    peer, offered = welcomed(server)
    connection = knock(offered.port, HELLO + offered.ticket)
    assert connection.recv(1) == ACCEPTED
    model = pb.WorkerMessage.FromString(model_bytes())
    model.model.direct = True
    peer.send(model.SerializeToString())
    return peer, connection


@pytest.mark.parametrize("length", [2**32 - 1, 9 << 20])
def test_a_message_of_a_length_that_cannot_be(server: Server, length: int) -> None:
    peer, connection = direct_peer(server)
    connection.sendall(struct.pack("<I", length) + bytes(100))
    assert peer.ended()[:2] == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    shows_it_works(server)


def test_no_protobuf(server: Server) -> None:
    peer, connection = direct_peer(server)
    connection.sendall(message(b"\xff" * 40))
    assert peer.ended()[:2] == ("INVALID_ARGUMENT", "BAD_REQUEST")
    shows_it_works(server)


@pytest.mark.parametrize("offset", [0, 2**40])
def test_bytes_placed_beyond_the_payload(server: Server, offset: int) -> None:
    shows_it_works(server)  # the run has weights
    peer, connection = direct_peer(server)
    header = contribution_header(1, 0)
    header.contribution.payload.in_shared_memory = True
    outside = message(out_of_band_frame(offset, 1 << 30))
    connection.sendall(message(header.SerializeToString()) + outside + bytes(1 << 20))
    assert peer.ended()[:2] == ("INVALID_ARGUMENT", "BAD_REQUEST")
    shows_it_works(server)


def test_one_that_stops_in_the_middle_of_a_payload(server: Server) -> None:
    """Its bytes are owed: after limits.progress_s without one it is let go."""
    shows_it_works(server)
    peer, connection = direct_peer(server)
    header = contribution_header(1, 0)
    header.contribution.payload.in_shared_memory = True
    frame = out_of_band_frame(0, header.contribution.payload.num_bytes)
    connection.sendall(message(header.SerializeToString()) + message(frame) + bytes(1000))
    assert peer.ended()[:2] == ("ABORTED", "TOO_SLOW")
    assert is_drained(connection)
    shows_it_works(server)


def is_drained(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.fixture
def direct(server: Server) -> Server:
    """Peers of it speak over direct connections."""
    server.transport = "direct"
    return server


def test_strangers_who_say_nothing_keep_nobody_out(direct: Server) -> None:
    """They make room for each other, not for whoever has a ticket."""
    port = direct.events("listening")[0]["direct_port"]
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(200)]
    for stranger in strangers[100::2]:
        stranger.sendall(HELLO[:3])
    direct.check_is_well(56)
    assert all(map(is_closed, strangers[:50]))
    for stranger in strangers:
        stranger.close()


def exchanges(server: Server, rank: int) -> Any:
    peer = server.peer(rank)
    peer.join()
    peer.contribute()
    assert peer.reply() == "APPLIED"
    return peer


def test_a_length_byte_by_byte(direct: Server) -> None:
    """Nothing is owed between two messages; who stops in the middle of one's length holds nobody up, and goes on."""
    peer = exchanges(direct, 48)
    data = message(contribution_header(peer.seq + 1, peer.version).SerializeToString())
    for byte in data[:-1]:
        peer.raw(bytes([byte]))
    exchanges(direct, 49)
    peer.raw(data[-1:])
    assert peer.ended()[:2] == ("ABORTED", "TOO_SLOW")  # the payload that was announced, of which nothing comes


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


def test_a_flood_of_tickets(direct: Server) -> None:
    """Many who join and never come: their tickets end with them."""
    for _ in range(100):
        peer, _ = welcomed(direct)
        peer.close()
    exchanges(direct, 55)
