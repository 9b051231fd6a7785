"""Whatever comes, reading it never crashes: the fields of a message in any order, cut off, hostile."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paramserver.common.wire.frames import frame, parse
from paramserver.proto import parameter_server_pb2 as pb

from .messages import MESSAGES, check_against_protobuf, header_of, refused_as_bad_request


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


@st.composite
def raw_fields(draw: st.DrawFn) -> bytes:
    """One field: known or unknown number, any wire type, at times with the wrong type for its number."""
    number = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 14, 14, 14, 15, 15, 15, 7, 13, 16, 1000, 2**29 - 1]))
    wire_type = draw(st.sampled_from([0, 0, 1, 2, 2, 2, 3, 5]))
    if wire_type == 0:
        return tag(number, 0) + varint(draw(st.integers(0, 2**64 - 1) | st.integers(0, 300)))
    if wire_type == 1:
        return tag(number, 1) + draw(st.binary(min_size=8, max_size=8))
    if wire_type == 5:
        return tag(number, 5) + draw(st.binary(min_size=4, max_size=4))
    if wire_type == 3:
        inner = b"".join(draw(st.lists(raw_fields(), max_size=2)))
        return tag(number, 3) + inner + tag(number, 4)
    if number in (1, 2, 3, 4, 5, 6):
        # Fields 1 and 2 of the submessages are numbers, strings or messages: at times this does not parse.
        payload = draw(st.sampled_from([b"", b"\x08\x01", b"\x10\x05", b"\x08\x01\x10\x02", b"\xa8\x1f\x01"]))
    else:
        payload = draw(st.binary(max_size=40))
    return tag(number, 2) + varint(len(payload)) + payload


OFFSET_5, DATA_HI = tag(14, 0) + b"\x05", tag(15, 2) + b"\x02hi"
FIXED_20 = tag(20, 5) + b"abcd"


@pytest.mark.parametrize("message_class", MESSAGES)
@given(
    raw=st.lists(raw_fields(), max_size=8).map(b"".join) | st.binary(max_size=100), cut=st.just(0) | st.integers(1, 200)
)
@example(raw=OFFSET_5 + FIXED_20 + DATA_HI, cut=0)
@example(raw=DATA_HI + FIXED_20 + OFFSET_5, cut=0)
@example(raw=OFFSET_5 + DATA_HI + FIXED_20 + tag(14, 0) + b"\x00", cut=0)
@example(raw=OFFSET_5 + DATA_HI + tag(21, 3) + tag(21, 4) + tag(15, 2) + b"\x00", cut=0)
@example(raw=b"\xf0\x80\x80\x80\x00\x05", cut=0)  # numbers longer than needed: a tag of five bytes, of six,
@example(raw=b"\xf0\x80\x80\x80\x80\x00\x05", cut=0)
@example(raw=b"\x7a\x82\x80\x80\x80\x00hi", cut=0)  # a length of five bytes, of six,
@example(raw=b"\x7a\x82\x80\x80\x80\x80\x00hi", cut=0)
@example(raw=b"\x70" + b"\xff" * 9 + b"\x7f", cut=0)  # and a value of 70 bits, which loses the upper ones
@settings(max_examples=800, deadline=None)
def test_any_fields_in_any_order_cut_off_anywhere_and_garbage(message_class: Any, raw: bytes, cut: int) -> None:
    check_against_protobuf(message_class, raw[: len(raw) - min(cut, len(raw))])


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_flipped_byte(at: int, byte: int) -> None:
    raw = bytearray(frame(header_of(pb.WorkerMessage), 300, [memoryview(bytes(200))]))
    raw[at % len(raw)] = byte
    check_against_protobuf(pb.WorkerMessage, bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x7a" + varint(2**62) + b"abc", id="data that claims to be 4 EiB"),
        pytest.param(b"\x22" + varint(2**40) + b"abc", id="a contribution that claims to be 1 TiB"),
        pytest.param(b"\x7a" + b"\xff" * 9 + b"\x7f", id="a length of 70 bits"),
        pytest.param(b"\x7a" + b"\x80" * 5000, id="a varint that never ends"),
        pytest.param(b"\x80" * 11 + b"\x01", id="a tag that is too long"),
        pytest.param(b"\xa3\x01" * 5000, id="five thousand open groups"),
        pytest.param(b"\x1f", id="wire type 7"),
        pytest.param(b"\x00\x00", id="field number 0"),
        pytest.param(b"\x0a\x02\xff\xff", id="a Join that does not parse"),
        pytest.param(b"\x0a\x03\x0a\x01\xff", id="a run's name that is not UTF-8"),
    ],
)
def test_hostile_messages_are_refused_without_memory(raw: bytes) -> None:
    tracemalloc.start()
    try:
        refused_as_bad_request(lambda: parse(pb.WorkerMessage, raw))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
