"""Frames: protobuf messages with tensor bytes, written and read without copying the tensors.

A frame is a valid WorkerMessage or ServerMessage. Its small fields come first, then tag and length of the last field,
`data`, then the tensor bytes. Writing joins these parts once. Reading takes `data` as a view into the received message,
and lets protobuf parse only the other fields. The alternatives are slower (docs/log.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ...proto import parameter_server_pb2 as pb
from ..errors import bad_request
from .bounds import UNCOUNTED_BYTES, check_items, read_varint

# Chosen by measurement (docs/log.md): 512 KiB is as fast; 4 MiB, and 256 KiB or less, are slower.
CHUNK_BYTES = 1 << 20
MAX_DATA_BYTES = 4 << 20
# A payload up to this size travels in the message that announces it.
INLINE_BYTES = 64 << 10
# gRPC refuses larger messages before it allocates them. The limit is one chunk plus 4 MiB for a manifest.
MAX_MESSAGE_BYTES = MAX_DATA_BYTES + (4 << 20)

_OUT_OF_BAND_TAG = bytes([pb.WorkerMessage.OUT_OF_BAND_FIELD_NUMBER << 3])
_OFFSET_TAG = bytes([pb.WorkerMessage.OFFSET_FIELD_NUMBER << 3])
_DATA_TAG = bytes([pb.WorkerMessage.DATA_FIELD_NUMBER << 3 | 2])
assert pb.ServerMessage.OUT_OF_BAND_FIELD_NUMBER == pb.WorkerMessage.OUT_OF_BAND_FIELD_NUMBER
assert pb.ServerMessage.OFFSET_FIELD_NUMBER == pb.WorkerMessage.OFFSET_FIELD_NUMBER
assert pb.ServerMessage.DATA_FIELD_NUMBER == pb.WorkerMessage.DATA_FIELD_NUMBER
assert pb.ServerMessage.LEFT_OUT_FIELD_NUMBER == pb.WorkerMessage.LEFT_OUT_FIELD_NUMBER

Buffer = bytes | bytearray | memoryview
Header = TypeVar("Header", bound=Message)

# Pieces arrive nearly in order, so few separate ranges are enough. The reader refuses more.
_MAX_RANGES = 4096
# A payload may have so many pieces, and one more for each KiB: a piece costs time whatever its size.
_MAX_PIECES = 1 << 15
# Our own messages have at most four fields. `_split` gives up after 64, because a loop in Python is slow.
_MAX_FIELDS = 64
_ZEROS = bytes(MAX_DATA_BYTES)
# Below this size protobuf parses a message faster than Python finds `data` in it.
_WHOLE_BYTES = UNCOUNTED_BYTES
_ZERO_CHECK_BYTES = CHUNK_BYTES // 4  # unit in which `without_zeros` looks for zeros


class Frame(NamedTuple):
    """One received message: its header, if it has one (else `kind` is None), and a piece of a payload."""

    kind: str | None
    header: Message | None  # the submessage that is named `kind`
    offset: int
    data: memoryview
    out_of_band: int = 0  # bytes from `offset` in the sender's shared memory, or after the message
    left_out: int = 0  # bytes from `offset` that are not sent

    def of(self, message: type[Header]) -> Header:
        """Return the header as `message`. The caller has already checked `kind`."""
        assert isinstance(self.header, message)
        return self.header


@lru_cache(maxsize=64)  # the size of a small payload is always the same
def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_LEFT_OUT_TAG = _varint(pb.WorkerMessage.LEFT_OUT_FIELD_NUMBER << 3)


def frame(header: Message | None, offset: int = 0, pieces: Iterable[Buffer] = ()) -> bytes:
    """Return one message: `header` (a WorkerMessage or ServerMessage), then `pieces` as its `data`."""
    parts: list[Buffer] = [header.SerializeToString()] if header is not None else []
    pieces = list(pieces)
    num_bytes = sum(map(len, pieces))
    if offset:
        parts += (_OFFSET_TAG, _varint(offset))
    if num_bytes:
        parts += (_DATA_TAG, _varint(num_bytes), *pieces)
    return b"".join(parts)


def stretches(pieces: Iterable[memoryview], offset: int, num_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Divide the pieces of a payload, in order from `offset`, into stretches of `num_bytes`.

    Yields the offset of each stretch and its parts.
    """
    pending: list[memoryview] = []
    pending_bytes = 0
    for piece in pieces:
        while len(piece):
            part = piece[: num_bytes - pending_bytes]
            pending.append(part)
            pending_bytes += len(part)
            piece = piece[len(part) :]
            if pending_bytes == num_bytes:
                yield offset, pending
                offset, pending, pending_bytes = offset + pending_bytes, [], 0
    if pending:
        yield offset, pending


def payload_frames(pieces: Iterable[memoryview], offset: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the pieces of a payload, in order from `offset`, as messages of `chunk_bytes` without a header."""
    return (frame(None, at, parts) for at, parts in stretches(pieces, offset, chunk_bytes))


def out_of_band_frame(offset: int, num_bytes: int) -> bytes:
    """Return a message for `num_bytes` of the payload that are in shared memory or follow this message."""
    return b"".join((_OUT_OF_BAND_TAG, _varint(num_bytes), _OFFSET_TAG, _varint(offset)))


def left_out_frame(offset: int, num_bytes: int) -> bytes:
    """Return a message for `num_bytes` of the payload that are not sent."""
    return b"".join((_OFFSET_TAG, _varint(offset), _LEFT_OUT_TAG, _varint(num_bytes)))


def without_zeros(pieces: Iterable[memoryview], offset: int = 0) -> Iterator[tuple[int, list[memoryview], int]]:
    """Divide the pieces of a payload, in order from `offset`, into stretches of data and stretches of zeros.

    Yields (offset, parts, 0) for data, and (offset, [], number of zeros) for zeros. The check takes 1 us for each
    256 KiB of data. Zeros take longer, because the check reads all of them.
    """
    units = stretches(pieces, offset, _ZERO_CHECK_BYTES)
    for is_zeros, found in groupby(units, key=lambda item: all(map(_ZEROS.startswith, item[1]))):
        stretch = list(found)
        start, end = stretch[0][0], stretch[-1][0] + sum(map(len, stretch[-1][1]))
        if not is_zeros:
            yield start, [part for _, parts in stretch for part in parts], 0
            continue
        for at in range(start, end, MAX_DATA_BYTES):
            yield at, [], min(MAX_DATA_BYTES, end - at)


def message_frames(header: Message, pieces: Iterable[memoryview], num_bytes: int | None = None) -> Iterator[bytes]:
    """Yield `header` and the payload that it announces. A small payload is in the same message.

    `num_bytes`: size of the payload; None: it is counted, so the pieces must all stay valid.
    """
    if num_bytes is None:
        pieces = list(pieces)
        num_bytes = sum(map(len, pieces))
    if num_bytes <= INLINE_BYTES:
        yield frame(header, 0, pieces)
    else:
        yield frame(header)
        yield from payload_frames(pieces)


def _split(raw: bytes | bytearray) -> tuple[Buffer, memoryview | None]:
    """Return the fields before `data`, and `data` as a view, if it is the last field; else all bytes, and None."""
    view, at = memoryview(raw), 0
    with suppress(ValueError, IndexError):  # another field is the last, or protobuf refuses these bytes
        for _ in range(_MAX_FIELDS):
            start = at
            tag, at = read_varint(raw, at, 5)
            size, at = read_varint(raw, at)
            if tag & 7 == 2:
                at += size
            elif tag & 7:  # a field that our own messages do not have
                break
            if tag == _DATA_TAG[0] and at == len(raw):
                return view[:start], view[at - size :]
    return raw, None


def parse(message_class: Callable[[], Any], raw: bytes | bytearray) -> Frame:
    """Read one frame. `data` is a view into `raw`, except for a small message.

    Accepts every message that protobuf accepts (any field order, repeated and unknown fields).
    Raises a BAD_REQUEST refusal for other bytes.
    """
    message = message_class()
    header, data = _split(raw) if len(raw) > _WHOLE_BYTES else (raw, None)
    try:
        if len(header) > UNCOUNTED_BYTES:
            check_items(header, message.DESCRIPTOR)
        message.ParseFromString(header)
    except (ValueError, IndexError, DecodeError):
        raise bad_request(f"a message of {len(raw)} bytes is not valid protobuf") from None
    kind = message.WhichOneof("kind")
    topic = getattr(message, kind) if kind else None
    data = memoryview(message.data) if data is None else data
    return Frame(kind, topic, message.offset, data, message.out_of_band, message.left_out)


class PayloadReader:
    """Collects the pieces of one announced payload, in any order. Each byte must come once.

    The reader calls, for each piece:
    - `write(offset, data)` if the bytes are in the message
    - `receive_out_of_band(offset, num_bytes)` if the bytes are in the sender's shared memory or follow the message
    - `leave(offset, num_bytes)` if the bytes were left out. Without `leave`, it writes zeros.

    Raises a BAD_REQUEST refusal for a piece that overlaps another, goes past the end, or is out of band without
    `receive_out_of_band`.
    """

    def __init__(
        self,
        num_bytes: int,
        write: Callable[[int, memoryview], None],
        receive_out_of_band: Callable[[int, int], object] | None = None,
        leave: Callable[[int, int], object] | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self.received = 0
        self._pieces_left = _MAX_PIECES + (num_bytes >> 10)
        self._write = write
        self._receive_out_of_band = receive_out_of_band
        self._leave = leave
        # Received bytes as disjoint ranges: the sorted starts, and the end of each range.
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def is_complete(self) -> bool:
        return self.received == self.num_bytes

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The received bytes as [start, end), ascending and disjoint."""
        return list(zip(self._starts, self._ends, strict=True))

    def has(self, start: int, end: int) -> None:
        """Count bytes [start, end) as received, because the receiver has them already."""
        self._cover(start, end)
        self.received += end - start

    def forget(self) -> None:
        """Accept no more pieces, and drop the callbacks: a cycle between them and this reader would keep memory."""
        self._write, self._receive_out_of_band = _refuse_piece, None

    def feed(self, piece: Frame) -> None:
        """Pass the bytes of one piece to their callback. Raises a BAD_REQUEST refusal."""
        sizes = len(piece.data), piece.out_of_band, piece.left_out
        num_bytes = max(sizes)
        if num_bytes == 0:
            if piece.kind is None and self.num_bytes:
                raise bad_request("an empty piece of a payload")
            return
        is_written = not piece.out_of_band and (self._leave is None or not piece.left_out)
        if sum(sizes) > num_bytes:
            message = "a message with two pieces of a payload: only one of data, out_of_band and left_out is possible"
            raise bad_request(message)
        if is_written and num_bytes > MAX_DATA_BYTES:
            message = f"a piece of {num_bytes:,} bytes: data and left_out of a message have at most {MAX_DATA_BYTES:,}"
            raise bad_request(message)
        if piece.out_of_band and self._receive_out_of_band is None:
            raise bad_request("an out-of-band piece, for a payload that travels in messages")
        self._pieces_left -= 1
        if self._pieces_left < 0:
            raise bad_request(f"a payload of {self.num_bytes} bytes has too many pieces")
        self._cover(piece.offset, piece.offset + num_bytes)
        self.received += num_bytes
        if is_written:
            self._write(piece.offset, piece.data or memoryview(_ZEROS)[:num_bytes])
        elif piece.out_of_band and self._receive_out_of_band is not None:
            self._receive_out_of_band(piece.offset, piece.out_of_band)
        elif self._leave is not None:
            self._leave(piece.offset, piece.left_out)

    def _cover(self, start: int, end: int) -> None:
        """Add bytes [start, end) to the received ranges."""
        starts, ends = self._starts, self._ends
        at = bisect.bisect_right(starts, start)
        is_free = (at == 0 or ends[at - 1] <= start) and (at == len(starts) or end <= starts[at])
        if end > self.num_bytes or not is_free or len(starts) >= _MAX_RANGES:
            raise bad_request(
                f"a piece at {start}..{end} of a payload of {self.num_bytes} bytes: it goes past the end, repeats "
                f"bytes, or follows {_MAX_RANGES} separate ranges"
            )
        starts.insert(at, start)
        ends.insert(at, end)
        if at + 1 < len(starts) and starts[at + 1] == end:  # merge with the next range
            del starts[at + 1], ends[at]
        if at > 0 and ends[at - 1] == start:  # merge with the range before
            del starts[at], ends[at - 1]


def _refuse_piece(offset: int, data: memoryview) -> None:
    raise bad_request("a piece after the end of its payload")
