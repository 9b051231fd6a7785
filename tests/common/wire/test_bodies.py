"""Payloads on their way: whole tensors, in chunks of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.kinds import ContributionKind
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
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors


class Tensors(nn.Module):
    """Any tensors as a model: floats are parameters with that gradient, the others buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            name = f"t_{name}"  # "half" is a method
            if tensor.is_floating_point():
                parameter = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype))
                parameter.grad = tensor
                self.register_parameter(name, parameter)
            else:
                self.register_buffer(name, tensor)


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.25),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(20, 3)[::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "half": torch.randn(3).half(),
        "bf16": torch.randn(9, 3).bfloat16(),
        "double": torch.randn(11, dtype=torch.float64),
        "long": torch.arange(-5, 8),
        "flags": torch.tensor([True, False, True]),
        "flag": torch.tensor(True),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "no_longs": torch.zeros(0, dtype=torch.int64),
    }


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


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000, CHUNK_BYTES])
def test_odd_tensors_survive_the_whole_way(chunk_bytes: int) -> None:
    tensors = {f"t_{name}": tensor for name, tensor in odd_tensors().items()}
    model = ModelTensors(Tensors(odd_tensors()))
    pieces = DirectTransfer(model).gather(ContributionKind.GRADIENT)[0].pieces
    layout = model.layout
    assert sum(map(len, pieces)) == layout.exchange_bytes
    payload = through_the_wire(payload_frames(pieces, chunk_bytes=chunk_bytes), layout.exchange_bytes)
    seen = set()
    for spec, received in layout.views(payload):
        assert received.dtype == tensors[spec.name].dtype
        assert torch.equal(received, tensors[spec.name]), spec.name
        seen.add(spec.name)
    assert seen == set(tensors)


def test_five_thousand_small_tensors() -> None:
    tensors = {str(i): torch.full((i % 5,), float(i)) for i in range(5000)}
    model = ModelTensors(Tensors(tensors))
    pieces = DirectTransfer(model).gather(ContributionKind.GRADIENT)[0].pieces
    payload = through_the_wire(payload_frames(pieces, chunk_bytes=1013), model.layout.exchange_bytes)
    for spec, received in model.layout.views(payload):
        assert torch.equal(received, tensors[spec.name[2:]])


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
