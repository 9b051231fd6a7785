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
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..errors import Reason, refusal
from .frames import CHUNK_BYTES, MAX_MESSAGE_BYTES, out_of_band_frame, stretches

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
_JOINED_BYTES = 4096  # a message up to this size is copied behind its length
# A receiver of a payload wakes up after so many bytes. Each wake-up costs the sender as much as copying 64 KiB.
WAKE_BYTES = 512 << 10
_RECORDS_BYTES = 32 << 10  # bytes that TLS may have read already, as part of an incomplete record
BUFFER_BYTES = 64 << 10
# Three probes after 4 s of silence, 2 s apart. TCP_USER_TIMEOUT is the limit for unacknowledged bytes, in ms.
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
# Exceptions of a socket call that has to wait until the socket is ready.
WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class OutOfBand(NamedTuple):
    """A message with `out_of_band`, and the payload bytes that follow it."""

    frame: bytes
    pieces: list[memoryview]


def to_buffers(message: bytes | OutOfBand) -> Pieces:
    """Return the buffers to write for `message`, in order."""
    raw, pieces = message if isinstance(message, OutOfBand) else (message, [])
    length = _LENGTH.pack(len(raw))
    return [length, raw, *pieces] if len(raw) > _JOINED_BYTES else [length + raw, *pieces]


def out_of_band_messages(pieces: Iterable[memoryview], offset: int = 0) -> Iterator[OutOfBand]:
    """Yield the pieces of a payload, in order from `offset`, as messages of at most OUT_OF_BAND_BYTES."""
    for at, parts in stretches(pieces, offset, OUT_OF_BAND_BYTES):
        yield OutOfBand(out_of_band_frame(at, sum(map(len, parts))), parts)


def take_front(pieces: Pieces) -> list[memoryview]:
    """Return the front of `pieces`, for one system call."""
    found, num_bytes = [], MAX_SEND_BYTES
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


class Incoming:
    """The received bytes of a direct connection, without I/O: messages, and payload bytes that follow a message.

    The owner of the socket receives into `free`, and passes the number of bytes to `next_message`.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # range of received bytes in the buffer that are not used yet
        self._large: bytearray | None = None  # an incomplete message that is larger than the buffer
        self.free = self._buffer

    def next_message(self, num_bytes: int = 0) -> bytes | bytearray | None:
        """Count `num_bytes` that were received into `free`. Return the next message, or None if it is not complete.

        Raises a LIMIT_EXCEEDED refusal for a message that is too large.
        """
        if (large := self._large) is not None:
            self.free = self.free[num_bytes:]
            if len(self.free):
                return None
            self._large, self.free = None, self._buffer
            return large
        self._end += num_bytes
        start = self._start + LENGTH_BYTES
        if start <= self._end:
            (length,) = _LENGTH.unpack_from(self._buffer, self._start)
            if start + length <= self._end:
                self._start = start + length
                return bytes(self._buffer[start : self._start])
            if length > MAX_MESSAGE_BYTES:
                problem = f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are possible"
                raise refusal(Reason.LIMIT_EXCEEDED, problem)
            if LENGTH_BYTES + length > BUFFER_BYTES:
                self._start, self._large = start, bytearray(length)
                whole = memoryview(self._large)
                self.free = whole[self.take(whole) :]
                return None
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            num_left = self._end - self._start
            self._buffer[:num_left] = self._buffer[self._start :]
            self._start, self._end = 0, num_left
        self.free = self._buffer[self._end :]
        return None

    def unread(self, message: bytes | bytearray) -> None:
        """Put the last message, which `next_message` returned, back into the buffer."""
        self._start -= LENGTH_BYTES + len(message)

    def take(self, target: memoryview) -> int:
        """Move the beginning of the received payload bytes to `target`, and return their number."""
        num_bytes = min(len(target), self._end - self._start)
        target[:num_bytes] = self._buffer[self._start : self._start + num_bytes]
        self._start += num_bytes
        if self._start == self._end:
            self._start, self._end, self.free = 0, 0, self._buffer
        return num_bytes


class DirectSocket(Incoming):
    """One side of a direct connection. Its calls raise one of WAITS where they had to wait for the other side.

    The worker then waits in poll (`worker/conversation/stream_client.py`), the server on its loop
    (`ps/wire/connection.py`).
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket, self._descriptor = connection, connection.fileno()
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self._tls_lock = threading.Lock()  # OpenSSL allows only one thread per connection at a time
        self._receive: Callable[[memoryview], int] = connection.recv_into if self._tls is None else self._receive_tls
        self._low_water = 1

    def wake_for(self, num_missing: int) -> None:
        """Let a poll report the socket readable once a good part of the missing bytes are there, or at the end.

        Set 1 before a blocking `recv`, which would otherwise wait for so many more bytes after a partial read.
        """
        num_bytes = min(WAKE_BYTES, num_missing - _RECORDS_BYTES) if num_missing > 2 * _RECORDS_BYTES else 1
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            with contextlib.suppress(OSError):  # some systems lack this option
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _receive_tls(self, target: memoryview) -> int:
        with self._tls_lock:
            return self._socket.recv_into(target)

    def read_now(self) -> bytes | bytearray | None:
        """Return the next message, or None if it has not arrived completely.

        Raises EOFError if the caller must use `read`: a large message, the end, or an error.
        """
        num_bytes = 0
        try:
            while (message := self.next_message(num_bytes)) is None:
                if self._large is not None or not (num_bytes := self._receive(self.free)):
                    raise EOFError
        except WAITS:
            return None
        except OSError:
            raise EOFError from None
        return message

    @property
    def has_more(self) -> bool:
        """Whether received bytes are in the buffer or in TLS, for which the kernel reports nothing."""
        if self._end > self._start or self._tls is None:
            return self._end > self._start
        with self._tls_lock:
            return self._tls.pending() > 0

    def send_now(self, pieces: Pieces) -> Pieces:
        """Send as much as the system accepts at once, and return the rest."""
        with contextlib.suppress(*WAITS):
            while pieces:
                is_small = len(pieces) == 1 and len(pieces[0]) <= MAX_SEND_BYTES
                front = pieces if is_small else take_front(pieces)
                if self._tls is not None:
                    with self._tls_lock:
                        num_sent = self._tls.send(front[0])
                else:
                    num_sent = self._socket.sendmsg(front)
                pieces = [] if is_small and num_sent == len(pieces[0]) else drop_front(pieces, num_sent)
        return pieces

    def shut_down(self, how: int) -> None:
        """Shut down the socket and keep its TLS state.

        `SSLSocket.shutdown` drops the TLS state, so a reader would get encrypted bytes as payload.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, how)


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
