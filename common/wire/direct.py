"""The direct connection: the messages of a stream over a socket of its own, where gRPC would copy and frame payloads.

    worker                                  server
    HELLO, ticket (32 bytes)            ->           the one that the Welcome has, within TICKET_S
                                        <-  TAKEN
    messages ...                       <->  messages ...

A message is its length, 4 bytes little-endian, and the protobuf bytes that the stream would carry. After one that says
`out_of_band` its bytes follow as they are, so that they are received where they belong. The stream it belongs to stays
open: it says why a conversation has ended, and each of the two ends with the other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .frames import CHUNK_BYTES, out_of_band_frame, stretches

HELLO = b"paramserver direct 1\n"
TICKET_BYTES = 32
TAKEN = b"\x06"
TICKET_S = 10.0
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
# So much of a payload follows one message: what has come whole is looked through while the rest is on its way.
OUT_OF_BAND_BYTES = 8 * CHUNK_BYTES
# A probe after 4 s of silence and then each 2 s, three times; bytes that nobody acknowledges, ms.
_NOTICED = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class OutOfBand(NamedTuple):
    """A message that says `out_of_band`, and the bytes that follow it."""

    frame: bytes
    pieces: list[memoryview]


def length_of(prefix: bytes | bytearray | memoryview, at: int = 0) -> int:
    """What the four bytes at `at` say."""
    found: int = _LENGTH.unpack_from(prefix, at)[0]
    return found


def on_the_wire(message: bytes | OutOfBand) -> list[bytes | memoryview]:
    """What is written for it, in order."""
    if isinstance(message, OutOfBand):
        return [_LENGTH.pack(len(message.frame)) + message.frame, *message.pieces]
    return [_LENGTH.pack(len(message)), message] if len(message) > 4096 else [_LENGTH.pack(len(message)) + message]


def out_of_band_messages(pieces: Iterable[memoryview], offset: int = 0) -> Iterator[OutOfBand]:
    """The pieces of a payload, in order from `offset`, as messages of at most OUT_OF_BAND_BYTES."""
    for at, parts in stretches(pieces, offset, OUT_OF_BAND_BYTES):
        yield OutOfBand(out_of_band_frame(at, sum(map(len, parts))), parts)


def shut_down(connection: socket.socket, how: int) -> None:
    """`shutdown`, after which TLS goes on being TLS: ssl's own forgets it, and whoever reads what has come is given
    encrypted bytes for a payload."""
    socket.socket.shutdown(connection, how)


def prepare(connection: socket.socket) -> None:
    """Small messages leave at once. A peer that can no longer be reached this way, while its stream can, is noticed
    in about ten seconds, also by who only waits for it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _NOTICED.items():
        if (option := getattr(socket, name, None)) is not None:  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
