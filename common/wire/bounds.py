"""What a message would unfold to, before protobuf unfolds it.

Two bytes on the wire can become an object of a hundred, so 8 MB of them become hundreds of MB before anyone
can look at them. Large messages are counted first: every field, every empty submessage, every packed number.
"""

from __future__ import annotations

import functools
from typing import Any

# Counted in about 0.2 s, unfolded into about 20 MB. A model needs about 13 for each of its tensors.
MAX_ITEMS = 500_000
# Smaller messages cannot unfold to much.
UNCOUNTED_BYTES = 16 << 10
_ITEMS_OF_A_MESSAGE = 4

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class TooMuchError(Exception):
    """A message of more than MAX_ITEMS."""


def check_items(raw: bytes | memoryview, descriptor: Any) -> None:
    """`raw` as a message of `descriptor`. Raises TooMuchError, and ValueError or IndexError for what is no protobuf
    or uses its old groups."""
    num_left = MAX_ITEMS
    pending = [(0, len(raw), descriptor)]
    while pending:
        at, end, descriptor = pending.pop()
        fields = _fields_of(descriptor)
        while at < end:
            num_left -= 1
            if num_left < 0:
                raise TooMuchError
            tag, at = read_varint(raw, at)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = read_varint(raw, at)
            elif wire_type == _LENGTH:
                length, at = read_varint(raw, at)
                if at + length > end:
                    raise ValueError("truncated")
                inner = fields.get(tag >> 3)
                if inner is _PACKED:
                    num_left -= length
                elif inner is not None:
                    num_left -= _ITEMS_OF_A_MESSAGE
                    pending.append((at, at + length, inner))
                at += length
            elif wire_type in (_FIXED64, _FIXED32):
                at += 8 if wire_type == _FIXED64 else 4
            else:
                raise ValueError("a group")
        if at > end:
            raise ValueError("truncated")


_PACKED = "packed"


@functools.cache
def _fields_of(descriptor: Any) -> dict[int, Any]:
    """Fields that unfold: descriptors of submessages, or that numbers are packed."""
    found: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            found[field.number] = field.message_type
        elif field.is_repeated and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            found[field.number] = _PACKED
    return found


def read_varint(raw: bytes | memoryview, at: int, max_bytes: int = 10) -> tuple[int, int]:
    """Its value, and where the next byte is. ValueError for one of more bytes, IndexError where `raw` ends in it."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift >= 7 * max_bytes:
            raise ValueError("varint too long")
