"""Frames are valid protobuf in both directions, whatever they carry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.wire.frames import MAX_DATA_BYTES, frame, parse
from paramserver.proto import parameter_server_pb2 as pb

from .messages import MESSAGES, header_of


@pytest.mark.parametrize("message_class", MESSAGES)
@given(
    has_header=st.booleans(),
    offset=st.sampled_from([0, 1, 127, 128, 300, 2**32, 2**63, 2**64 - 1]),
    pieces=st.lists(st.binary(max_size=200), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_a_frame_is_the_message_protobuf_would_write(
    message_class: Any, has_header: bool, offset: int, pieces: list[bytes]
) -> None:
    header = header_of(message_class) if has_header else None
    raw = frame(header, offset, [memoryview(piece) for piece in pieces])
    expected = message_class()
    if header is not None:
        expected.CopyFrom(header)
    expected.offset, expected.data = offset, b"".join(pieces)
    assert message_class.FromString(raw) == expected
    assert raw == expected.SerializeToString(), "the same bytes, so any reader's fast path holds"


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, MAX_DATA_BYTES])
def test_lengths_around_every_varint_boundary(num_bytes: int) -> None:
    data = bytes(num_bytes)
    raw = frame(None, 5, [memoryview(data)])
    assert pb.WorkerMessage.FromString(raw) == pb.WorkerMessage(offset=5, data=data)
    parsed = parse(pb.WorkerMessage, raw)
    assert (parsed.offset, bytes(parsed.data)) == (5, data)
    if num_bytes > 1 << 14:
        assert parsed.data.obj is raw, "data is a view into the message, not a copy, where that takes longer"


@pytest.mark.parametrize(
    ("message_class", "field"),
    [(kind, field.name) for kind in MESSAGES for field in kind.DESCRIPTOR.oneofs[0].fields],
)  # fmt: skip
def test_every_kind_is_found(message_class: Any, field: str) -> None:
    message = message_class()
    getattr(message, field).SetInParent()
    assert parse(message_class, message.SerializeToString()).kind == field


def test_a_header_is_what_its_kind_says() -> None:
    sent = header_of(pb.WorkerMessage)
    received = parse(pb.WorkerMessage, sent.SerializeToString())
    assert received.of(pb.Contribution) == sent.contribution
    with pytest.raises(AssertionError):
        received.of(pb.Leave)
    with pytest.raises(AssertionError):
        parse(pb.WorkerMessage, frame(None, 0, [memoryview(b"x")])).of(pb.Contribution)
