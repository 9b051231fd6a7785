"""Format of the direct connection: the messages of a stream over a separate socket, without gRPC's copies and framing.

    worker                                  server
    HELLO, ticket (32 bytes)            ->           the ticket from Welcome, within TICKET_S
                                        <-  ACCEPTED
    messages ...                       <->  messages ...

A message is its length (4 bytes, little-endian) and the protobuf bytes that the stream would carry. Payload bytes
follow a message with `out_of_band`, so the receiver reads them straight into their final memory. The gRPC stream stays
open: it carries the reason why a conversation ends. When the stream or the connection ends, the other ends too.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .frames import CHUNK_BYTES, out_of_band_frame, stretches

Pieces = list[bytes | memoryview]

HELLO = b"paramserver direct 1\n"
TICKET_BYTES = 32
ACCEPTED = b"\x06"
TICKET_S = 10.0
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
# Most payload bytes that one message announces. Between two messages the receiver pauses for up to 2 ms
# (docs/measurements.md).
OUT_OF_BAND_BYTES = 32 * CHUNK_BYTES
# Bytes of one system call. Over loopback, longer calls take longer for the same bytes (docs/measurements.md).
MAX_SEND_BYTES = 1 << 20
_MAX_SEND_BUFFERS = 64  # of one system call; the system's limit is 1,024
# A receiver of a payload wakes up after so many bytes. Each wake-up costs the sender as much as copying 64 KiB.
WAKE_BYTES = 512 << 10
# Three probes after 4 s of silence, 2 s apart. TCP_USER_TIMEOUT is the limit for unacknowledged bytes, in ms.
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class OutOfBand(NamedTuple):
    """A message with `out_of_band`, and the payload bytes that follow it."""

    frame: bytes
    pieces: list[memoryview]


def decode_length(prefix: bytes | bytearray | memoryview, at: int = 0) -> int:
    """Return the message length that the four bytes at `at` encode."""
    return int(_LENGTH.unpack_from(prefix, at)[0])


def to_buffers(message: bytes | OutOfBand) -> Pieces:
    """Return the buffers to write for `message`, in order."""
    if isinstance(message, OutOfBand):
        return [_LENGTH.pack(len(message.frame)) + message.frame, *message.pieces]
    return [_LENGTH.pack(len(message)), message] if len(message) > 4096 else [_LENGTH.pack(len(message)) + message]


def out_of_band_messages(pieces: Iterable[memoryview], offset: int = 0) -> Iterator[OutOfBand]:
    """Yield the pieces of a payload, in order from `offset`, as messages of at most OUT_OF_BAND_BYTES."""
    for at, parts in stretches(pieces, offset, OUT_OF_BAND_BYTES):
        yield OutOfBand(out_of_band_frame(at, sum(map(len, parts))), parts)


def take_front(pieces: Pieces, num_bytes: int = MAX_SEND_BYTES) -> list[memoryview]:
    """Return at most `num_bytes` from the front of `pieces`, for one system call."""
    found: list[memoryview] = []
    for piece in pieces[:_MAX_SEND_BUFFERS]:
        found.append(memoryview(piece)[:num_bytes])
        num_bytes -= len(piece)
        if num_bytes <= 0:
            break
    return found


def drop_front(pieces: Pieces, num_bytes: int) -> Pieces:
    """Return the pieces without their first `num_bytes`."""
    for index, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [memoryview(piece)[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= len(piece)
    return []


class LowWater:
    """Sets SO_RCVLOWAT: a poll reports the socket readable once so many bytes are there, or at the end.

    Set 1 before a blocking `recv`, which would otherwise wait for so many more bytes after a partial read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._num_bytes = connection, 1

    def set(self, num_bytes: int) -> None:
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            with contextlib.suppress(OSError):  # some systems lack this option
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def shut_down(connection: socket.socket, how: int) -> None:
    """Shut down a socket and keep its TLS state.

    `SSLSocket.shutdown` drops the TLS state, so a reader would get encrypted bytes as payload.
    """
    socket.socket.shutdown(connection, how)


def set_socket_options(connection: socket.socket) -> None:
    """Set the socket's options: send small messages at once, and probe the other side.

    If the connection fails while the gRPC stream still works, both sides notice within about ten seconds. A side that
    only waits notices too.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has these options
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
