"""Payloads on their way: whole tensors, in chunks of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.tensors.layout import as_bytes, new_payload
from paramserver.common.wire.frames import (
    CHUNK_BYTES,
    INLINE_BYTES,
    PayloadReader,
    message_frames,
    parse,
    payload_frames,
)
from paramserver.proto import parameter_server_pb2 as pb


def through_the_wire(frames: Iterator[bytes], num_bytes: int, message_class: Any = pb.WorkerMessage) -> torch.Tensor:
    """What a receiver has in memory once all frames have come."""
    payload = new_payload(num_bytes)
    target = as_bytes(payload)
    payload.fill_(0xAA)

    def write(offset: int, data: memoryview) -> None:
        target[offset : offset + len(data)] = data

    reader = PayloadReader(num_bytes, write)
    for raw in frames:
        assert len(raw) < CHUNK_BYTES + 1000
        assert not reader.is_complete or num_bytes == 0
        reader.feed(parse(message_class, raw))
    assert reader.is_complete
    return payload


@pytest.mark.parametrize("num_bytes", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_a_small_payload_travels_with_its_header(num_bytes: int) -> None:
    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    header = pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=num_bytes))
    frames = list(message_frames(header, [as_bytes(payload)]))
    assert parse(pb.WorkerMessage, frames[0]).header.payload_bytes == num_bytes
    assert len(frames) == (1 if num_bytes <= INLINE_BYTES else 1 + -(-num_bytes // CHUNK_BYTES))
    assert torch.equal(through_the_wire(iter(frames), num_bytes), payload)
    # The same message put together by protobuf alone, as a client in another language would.
    assert b"".join(pb.WorkerMessage.FromString(raw).data for raw in frames) == bytes(as_bytes(payload))


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    offset=st.sampled_from([0, 128, 2**40]),
    chunk_bytes=st.integers(1, 50),
)
@settings(max_examples=150, deadline=None)
def test_chunks_do_not_depend_on_the_pieces(sizes: list[int], offset: int, chunk_bytes: int) -> None:
    payload = bytes(range(256)) * 2
    total = sum(sizes)
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(payload)[at : at + size])
        at += size
    frames = [parse(pb.ServerMessage, raw) for raw in payload_frames(views, offset, chunk_bytes)]
    assert b"".join(bytes(piece.data) for piece in frames) == payload[:total]
    assert [piece.offset for piece in frames] == list(range(offset, offset + total, chunk_bytes))
    assert all(len(piece.data) == chunk_bytes for piece in frames[:-1])
