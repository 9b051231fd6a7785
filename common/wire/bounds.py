"""Limit on the memory that a protobuf message takes, checked before protobuf parses it.

Two bytes on the wire can become an object of a hundred bytes, so a message of 8 MB can take hundreds of MB once it is
parsed. This module first counts every field, every empty submessage and every packed number of a large message.
"""

from __future__ import annotations

import functools
from typing import Any

from ..errors import bad_request

# Counting so many items takes about 0.2 s, and parsed they take about 20 MB. A model has about 13 items per tensor.
MAX_ITEMS = 500_000
# Smaller messages cannot take much memory.
UNCOUNTED_BYTES = 16 << 10
_ITEMS_OF_A_MESSAGE = 4

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def check_items(raw: bytes | bytearray | memoryview, descriptor: Any) -> None:
    """Count the items of `raw`, a message of the type `descriptor`.

    Raises a BAD_REQUEST refusal above MAX_ITEMS. Raises ValueError or IndexError for bytes that are not valid protobuf,
    or that use protobuf's obsolete groups.
    """
    num_left = MAX_ITEMS
    pending = [(0, len(raw), descriptor)]
    while pending:
        at, end, descriptor = pending.pop()
        fields = _fields_of(descriptor)
        while at < end:
            num_left -= 1
            if num_left < 0:
                raise bad_request(f"a message of {len(raw)} bytes has more than {MAX_ITEMS} fields")
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
    """Return the fields that take more memory than bytes: a descriptor for a submessage, _PACKED for packed numbers."""
    found: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            found[field.number] = field.message_type
        elif field.is_repeated and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            found[field.number] = _PACKED
    return found


def read_varint(raw: bytes | bytearray | memoryview, at: int, max_bytes: int = 10) -> tuple[int, int]:
    """Return the value of the varint at `at`, and the position behind it.

    Raises ValueError for a varint of more than `max_bytes`, and IndexError if `raw` ends within it.
    """
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
