"""Frames are valid protobuf in both directions, whatever the tensors; whatever comes, reading it never crashes."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from paramserver.common.errors import ParamServerError, Reason
from paramserver.common.tensors.layout import as_bytes, new_body
from paramserver.common.wire.frames import (
    CHUNK_BYTES,
    INLINE_BYTES,
    MAX_DATA_BYTES,
    BodyReader,
    Frame,
    body_frames,
    frame,
    message_frames,
    parse,
)
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.tensors.transfer import DirectTransfer, ModelTensors

ROOT = Path(__file__).parents[2]
MESSAGES = [pb.WorkerMessage, pb.ServerMessage]


def refused_as_bad_request(call: Any) -> str:
    with pytest.raises(ParamServerError) as caught:
        call()
    assert caught.value.reason is Reason.BAD_REQUEST
    return caught.value.message


def header_of(message_class: Any) -> Any:
    if message_class is pb.WorkerMessage:
        return pb.WorkerMessage(contribution=pb.Contribution(step=7, base_version=3, body_bytes=11, codec="raw"))
    return pb.ServerMessage(answer=pb.Answer(outcome=pb.Answer.APPLIED, step=7, version=9, body_bytes=11, reason="é"))


# ---- ours, read by the generated classes ----------------------------------------------------


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


# ---- the generated classes', read by ours -----------------------------------------------------


@pytest.mark.parametrize("message_class", MESSAGES)
@given(has_header=st.booleans(), offset=st.integers(0, 2**64 - 1), data=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_what_protobuf_writes_is_read(message_class: Any, has_header: bool, offset: int, data: bytes) -> None:
    message = header_of(message_class) if has_header else message_class()
    message.offset, message.data = offset, data
    raw = message.SerializeToString()
    parsed = parse(message_class, raw)
    assert_same_as_protobuf(parsed, message)
    if data and has_header:
        address = memoryview(raw).obj
        assert parsed.data.obj is address, "data is a view into the message, not a copy"


def assert_same_as_protobuf(parsed: Frame, message: Any) -> None:
    assert parsed.offset == message.offset
    assert bytes(parsed.data) == message.data
    assert parsed.kind == message.WhichOneof("kind")
    if parsed.kind is not None:
        assert parsed.header == getattr(message, parsed.kind)


@pytest.mark.parametrize("field", [field.name for field in pb.WorkerMessage.DESCRIPTOR.oneofs[0].fields])
def test_every_kind_of_a_worker_is_found(field: str) -> None:
    message = pb.WorkerMessage()
    getattr(message, field).SetInParent()
    assert parse(pb.WorkerMessage, message.SerializeToString()).kind == field


@pytest.mark.parametrize("field", [field.name for field in pb.ServerMessage.DESCRIPTOR.oneofs[0].fields])
def test_every_kind_of_a_server_is_found(field: str) -> None:
    message = pb.ServerMessage()
    getattr(message, field).SetInParent()
    assert parse(pb.ServerMessage, message.SerializeToString()).kind == field


# ---- raw fields in any order ------------------------------------------------------------------


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


def check_against_protobuf(message_class: Any, raw: bytes) -> None:
    """Ours reads what protobuf reads, to the same values, and refuses what protobuf refuses."""
    try:
        message = message_class.FromString(raw)
    except DecodeError:
        refused_as_bad_request(lambda: parse(message_class, raw))
    else:
        assert_same_as_protobuf(parse(message_class, raw), message)


OFFSET_5, DATA_HI = tag(14, 0) + b"\x05", tag(15, 2) + b"\x02hi"
FIXED_20 = tag(20, 5) + b"abcd"


@pytest.mark.parametrize("message_class", MESSAGES)
@given(fields=st.lists(raw_fields(), max_size=8))
@example(fields=[OFFSET_5, FIXED_20, DATA_HI])
@example(fields=[DATA_HI, FIXED_20, OFFSET_5])
@example(fields=[OFFSET_5, DATA_HI, FIXED_20, tag(14, 0) + b"\x00"])
@example(fields=[OFFSET_5, DATA_HI, tag(21, 3) + tag(21, 4), tag(15, 2) + b"\x00"])
@settings(max_examples=400, deadline=None)
def test_any_order_of_known_and_unknown_fields(message_class: Any, fields: list[bytes]) -> None:
    check_against_protobuf(message_class, b"".join(fields))


@pytest.mark.parametrize("message_class", MESSAGES)
@given(fields=st.lists(raw_fields(), min_size=1, max_size=4), cut=st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_truncated_messages(message_class: Any, fields: list[bytes], cut: int) -> None:
    raw = b"".join(fields)
    check_against_protobuf(message_class, raw[: -(cut % len(raw)) or len(raw)])


@pytest.mark.parametrize("message_class", MESSAGES)
@given(raw=st.binary(max_size=100))
@settings(max_examples=500, deadline=None)
def test_garbage_is_a_bad_request_or_what_protobuf_makes_of_it(message_class: Any, raw: bytes) -> None:
    check_against_protobuf(message_class, raw)


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_flipped_byte(at: int, byte: int) -> None:
    raw = bytearray(frame(header_of(pb.WorkerMessage), 300, [memoryview(bytes(200))]))
    raw[at % len(raw)] = byte
    check_against_protobuf(pb.WorkerMessage, bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xf0\x80\x80\x80\x00\x05", id="a tag of five bytes is read"),
        pytest.param(b"\xf0\x80\x80\x80\x80\x00\x05", id="a tag of six bytes is refused"),
        pytest.param(b"\x7a\x82\x80\x80\x80\x00hi", id="a length of five bytes is read"),
        pytest.param(b"\x7a\x82\x80\x80\x80\x80\x00hi", id="a length of six bytes is refused"),
        pytest.param(b"\x70" + b"\xff" * 9 + b"\x7f", id="a value of 70 bits loses the upper ones"),
    ],
)
def test_numbers_written_longer_than_needed(raw: bytes) -> None:
    check_against_protobuf(pb.WorkerMessage, raw)


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


# ---- whole bodies -------------------------------------------------------------------------------


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
    body = new_body(num_bytes)
    target = as_bytes(body)
    body.fill_(0xAA)

    def write(offset: int, data: memoryview) -> None:
        target[offset : offset + len(data)] = data

    reader = BodyReader(num_bytes, write)
    for raw in frames:
        assert len(raw) < CHUNK_BYTES + 1000
        assert not reader.is_complete or num_bytes == 0
        reader.feed(parse(message_class, raw))
    assert reader.is_complete
    return body


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000, CHUNK_BYTES])
def test_odd_tensors_survive_the_whole_way(chunk_bytes: int) -> None:
    tensors = {f"t_{name}": tensor for name, tensor in odd_tensors().items()}
    model = ModelTensors(Tensors(odd_tensors()))
    pieces = DirectTransfer(model).gather("gradient")[0].pieces
    layout = model.layout
    assert sum(map(len, pieces)) == layout.exchange_bytes
    body = through_the_wire(body_frames(pieces, chunk_bytes=chunk_bytes), layout.exchange_bytes)
    seen = set()
    for spec, received in layout.views(body):
        assert received.dtype == tensors[spec.name].dtype
        assert torch.equal(received, tensors[spec.name]), spec.name
        seen.add(spec.name)
    assert seen == set(tensors)


def test_five_thousand_small_tensors() -> None:
    tensors = {str(i): torch.full((i % 5,), float(i)) for i in range(5000)}
    model = ModelTensors(Tensors(tensors))
    pieces = DirectTransfer(model).gather("gradient")[0].pieces
    body = through_the_wire(body_frames(pieces, chunk_bytes=1013), model.layout.exchange_bytes)
    for spec, received in model.layout.views(body):
        assert torch.equal(received, tensors[spec.name[2:]])


@pytest.mark.parametrize("num_bytes", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_a_small_body_travels_with_its_header(num_bytes: int) -> None:
    body = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    header = pb.WorkerMessage(initial_weights=pb.InitialWeights(body_bytes=num_bytes))
    frames = list(message_frames(header, [as_bytes(body)]))
    assert parse(pb.WorkerMessage, frames[0]).header.body_bytes == num_bytes
    assert len(frames) == (1 if num_bytes <= INLINE_BYTES else 1 + -(-num_bytes // CHUNK_BYTES))
    assert torch.equal(through_the_wire(iter(frames), num_bytes), body)
    # The same message put together by protobuf alone, as a client in another language would.
    joined = b"".join(pb.WorkerMessage.FromString(raw).data for raw in frames)
    assert joined == bytes(as_bytes(body))


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    offset=st.sampled_from([0, 128, 2**40]),
    chunk_bytes=st.integers(1, 50),
)
@settings(max_examples=150, deadline=None)
def test_chunks_do_not_depend_on_the_pieces(sizes: list[int], offset: int, chunk_bytes: int) -> None:
    body = bytes(range(256)) * 2
    total = sum(sizes)
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(body)[at : at + size])
        at += size
    frames = [parse(pb.ServerMessage, raw) for raw in body_frames(views, offset, chunk_bytes)]
    assert b"".join(bytes(piece.data) for piece in frames) == body[:total]
    assert [piece.offset for piece in frames] == list(range(offset, offset + total, chunk_bytes))
    assert all(len(piece.data) == chunk_bytes for piece in frames[:-1])


# ---- pieces that do not fit ----------------------------------------------------------------------


def piece(offset: int, num_bytes: int, kind: str | None = None) -> Frame:
    return Frame(kind, None, offset, memoryview(bytes(num_bytes)))


def placed(offset: int, num_bytes: int) -> Frame:
    return Frame(None, None, offset, memoryview(b""), num_bytes)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece(0, 4), piece(0, 4)], "at 0..4"),
        ([piece(0, 4), piece(2, 4)], "at 2..6"),
        ([piece(4, 4), piece(0, 5)], "at 0..5"),
        ([piece(4, 4), piece(5, 1)], "at 5..6"),
        ([piece(0, 2), piece(6, 2), piece(0, 8)], "at 0..8"),
        ([piece(0, 11)], "of a body of 10 bytes"),
        ([piece(0, 8), piece(8, 3)], "of a body of 10 bytes"),
        ([piece(8, 2), piece(10, 1)], "of a body of 10 bytes"),
        ([piece(2**64 - 1, 4)], "goes past the end"),
        ([piece(0, 4), piece(4, 0)], "an empty piece"),
        ([piece(0, 0)], "an empty piece"),
        ([placed(0, 10)], "not in one"),
        ([piece(0, 4), placed(4, 6)], "not in one"),
    ],
)
def test_pieces_out_of_place_are_refused(pieces: list[Frame], says: str) -> None:
    written = bytearray(10)

    def write(offset: int, data: memoryview) -> None:
        assert offset + len(data) <= 10
        written[offset : offset + len(data)] = b"x" * len(data)

    reader = BodyReader(10, write)
    for fitting in pieces[:-1]:
        reader.feed(fitting)
    before, received = bytes(written), reader.received
    assert says in refused_as_bad_request(lambda: reader.feed(pieces[-1]))
    assert (bytes(written), reader.received) == (before, received), "a refused piece leaves nothing behind"


@pytest.mark.parametrize(
    "wrong", [placed(2, 4), placed(8, 3), placed(2**64 - 1, 2**64 - 1), Frame(None, None, 4, memoryview(b"ab"), 2)]
)
def test_placed_pieces_are_held_to_the_same_rules(wrong: Frame) -> None:
    told: list[tuple[int, int]] = []
    reader = BodyReader(10, lambda *_: pytest.fail("nothing came by message"), lambda *piece: told.append(piece))
    reader.feed(placed(0, 4))
    refused_as_bad_request(lambda: reader.feed(wrong))
    reader.feed(placed(4, 6))
    assert told == [(0, 4), (4, 6)]
    assert reader.is_complete


def test_a_piece_above_the_limit_is_refused() -> None:
    reader = BodyReader(3 * MAX_DATA_BYTES, lambda *_: None)
    reader.feed(piece(0, MAX_DATA_BYTES))
    assert "at most" in refused_as_bad_request(lambda: reader.feed(piece(MAX_DATA_BYTES, MAX_DATA_BYTES + 1)))


def test_a_header_may_come_without_data() -> None:
    reader = BodyReader(10, lambda *_: None)
    reader.feed(piece(0, 0, kind="contribution"))
    assert not reader.is_complete
    reader.feed(piece(0, 10))
    assert reader.is_complete


def test_an_empty_body_is_complete_at_once() -> None:
    reader = BodyReader(0, lambda *_: pytest.fail("nothing to write"))
    reader.feed(piece(0, 0, kind="contribution"))
    assert reader.is_complete
    refused_as_bad_request(lambda: reader.feed(piece(0, 1)))


@given(
    num_bytes=st.integers(1, 60),
    attempts=st.lists(
        st.tuples(st.integers(0, 63) | st.integers(0, 2**64 - 1), st.integers(0, 20), st.booleans()), max_size=30
    ),
)
@settings(max_examples=300, deadline=None)
def test_whatever_comes_the_body_is_whole_or_refused(num_bytes: int, attempts: list[tuple[int, int, bool]]) -> None:
    """A model of the receiver: every byte is written once, in any order, none past the end."""
    body = bytes(range(num_bytes))
    written: dict[int, int] = {}

    def write(offset: int, piece_of_body: memoryview) -> None:
        written.update(enumerate(piece_of_body, offset))

    def place(offset: int, length: int) -> None:
        write(offset, memoryview(body)[offset : offset + length])

    reader = BodyReader(num_bytes, write, place)
    for offset, length, is_placed in [*attempts, *((at, 1, False) for at in range(num_bytes))]:
        fits = length > 0 and offset + length <= num_bytes and written.keys().isdisjoint(range(offset, offset + length))
        before = dict(written)
        content = (body + b"zzz")[offset : offset + length].ljust(length, b"z")
        with contextlib.nullcontext() if fits else pytest.raises(ParamServerError):
            reader.feed(placed(offset, length) if is_placed else Frame(None, None, offset, memoryview(content)))
        assert len(written) == reader.received
        assert fits or written == before
    assert reader.is_complete
    assert bytes(value for _, value in sorted(written.items())) == body


@given(data=st.data(), cuts=st.lists(st.integers(1, 999), unique=True, max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_may_come_in_any_order(data: st.DataObject, cuts: list[int]) -> None:
    """Whole exactly once: not before the last piece, whichever that is, and nothing fits afterwards."""
    borders = [0, *sorted(cuts), 1000]
    pieces = data.draw(st.permutations(list(itertools.pairwise(borders))))
    reader = BodyReader(1000, lambda *_: None)
    for start, end in pieces:
        assert not reader.is_complete
        reader.feed(piece(start, end - start))
        again = data.draw(st.integers(start, end - 1))
        refused_as_bad_request(lambda again=again: reader.feed(piece(again, 1)))
    assert reader.is_complete


def test_a_body_in_dust_is_refused_before_it_costs_memory() -> None:
    """Every other byte: nothing joins. In order, the same small pieces are fine."""
    reader = BodyReader(1 << 20, lambda *_: None)

    def scatter() -> None:
        for at in range(0, 1 << 20, 2):
            reader.feed(piece(at, 1))

    refused_as_bad_request(scatter)
    assert 1000 < reader.received < 10_000
    reader = BodyReader(1 << 14, lambda *_: None)
    for at in range(1 << 14):
        reader.feed(piece(at, 1))
    assert reader.is_complete


# ---- the generated code ------------------------------------------------------------------------


def test_the_committed_protobuf_code_is_generated_from_the_proto(tmp_path: Path) -> None:
    """As `make proto` does it; fails when somebody edits one without the other."""
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Iparamserver/proto=proto", *outputs,
         "paramserver/proto/parameter_server.proto"],
        cwd=ROOT, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    generated = {path.name: path.read_text() for path in (tmp_path / "paramserver/proto").iterdir()}
    assert len(generated) == 3
    for name, text in generated.items():
        assert (ROOT / "proto" / name).read_text() == text, f"proto/{name} is not what the proto gives: run make proto"
    makefile = (ROOT / "Makefile").read_text()
    assert "-Iparamserver/proto=proto --python_out" in makefile
    assert "paramserver/proto/parameter_server.proto" in makefile


def test_refusals_of_the_proto_are_those_of_the_code() -> None:
    """REASON_X in the proto and Reason.X in errors.py are one list."""
    names = {name.removeprefix("REASON_") for name in pb.Reason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert names == {reason.value for reason in Reason}
