"""Pieces of a payload, in any order: no byte twice, none past the end."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import ParamServerError
from paramserver.common.wire.frames import (
    MAX_DATA_BYTES,
    Frame,
    PayloadReader,
    left_out_frame,
    parse,
    payload_frames,
    without_zeros,
)
from paramserver.proto import parameter_server_pb2 as pb

from .messages import refused_as_bad_request


def piece(offset: int, num_bytes: int, kind: str | None = None) -> Frame:
    return Frame(kind, None, offset, memoryview(bytes(num_bytes)))


def out_of_band(offset: int, num_bytes: int) -> Frame:
    return Frame(None, None, offset, memoryview(b""), num_bytes)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece(0, 4), piece(0, 4)], "at 0..4"),
        ([piece(0, 8), piece(8, 3)], "of a payload of 10 bytes"),
        ([piece(2**64 - 1, 4)], "goes past the end"),
        ([piece(0, 4), piece(4, 0)], "an empty piece"),
        ([piece(0, 0)], "an empty piece"),
        ([out_of_band(0, 10)], "travels in messages"),
        ([piece(0, 4), out_of_band(4, 6)], "travels in messages"),
    ],
)
def test_pieces_out_of_place_are_refused(pieces: list[Frame], says: str) -> None:
    written = bytearray(10)

    def write(offset: int, data: memoryview) -> None:
        assert offset + len(data) <= 10
        written[offset : offset + len(data)] = b"x" * len(data)

    reader = PayloadReader(10, write)
    for fitting in pieces[:-1]:
        reader.feed(fitting)
    before, received = bytes(written), reader.received
    assert says in refused_as_bad_request(lambda: reader.feed(pieces[-1]))
    assert (bytes(written), reader.received) == (before, received), "a refused piece leaves nothing behind"


def left_out(offset: int, num_bytes: int) -> Frame:
    return Frame(None, None, offset, memoryview(b""), left_out=num_bytes)


def test_what_is_left_out_is_zeros_or_what_is_here_already() -> None:
    written = bytearray(b"x" * 10)
    reader = PayloadReader(10, lambda at, data: written.__setitem__(slice(at, at + len(data)), data))
    reader.feed(left_out(3, 4))
    refused_as_bad_request(lambda: reader.feed(left_out(6, 2)))
    refused_as_bad_request(lambda: reader.feed(Frame(None, None, 0, memoryview(b"ab"), left_out=2)))
    refused_as_bad_request(lambda: reader.feed(Frame(None, None, 0, memoryview(b""), 2, 2)))
    reader.feed(left_out(0, 3))
    assert bytes(written) == b"\0" * 7 + b"xxx"
    reader = PayloadReader(3 * MAX_DATA_BYTES, lambda *_: None)
    assert "at most" in refused_as_bad_request(lambda: reader.feed(left_out(0, MAX_DATA_BYTES + 1)))
    received: list[tuple[int, int]] = []
    reader = PayloadReader(3 * MAX_DATA_BYTES, lambda *_: None, leave=lambda *of: received.append(of))
    reader.feed(left_out(0, 3 * MAX_DATA_BYTES))
    assert reader.is_complete
    assert received == [(0, 3 * MAX_DATA_BYTES)]


@given(
    stretches=st.lists(st.tuples(st.integers(1, 3 << 18), st.booleans()), min_size=1, max_size=8),
    offset=st.sampled_from([0, 64, 5 << 20]),
)
@settings(max_examples=15, deadline=None)
def test_zeros_are_found_and_the_rest_arrives(stretches: list[tuple[int, bool]], offset: int) -> None:
    pieces = [memoryview(bytes(num_bytes) if is_zero else b"\0x" * num_bytes) for num_bytes, is_zero in stretches]
    payload = b"".join(pieces)
    found, sent = bytearray(b"y" * len(payload)), 0
    reader = PayloadReader(
        offset + len(payload), lambda at, data: found.__setitem__(slice(at - offset, at - offset + len(data)), data)
    )
    if offset:
        reader._cover(0, offset)
    for at, parts, num_zeros in without_zeros(pieces, offset):
        raws = payload_frames(parts, at) if parts else [left_out_frame(at, num_zeros)]
        for raw in raws:
            sent += len(raw)
            reader.feed(parse(pb.WorkerMessage, raw))
    assert bytes(found) == payload
    assert sent <= sum(len(piece) for piece in pieces if any(piece[:2])) + len(pieces) * (1 << 19) + 1000


def test_a_piece_above_the_limit_is_refused() -> None:
    reader = PayloadReader(3 * MAX_DATA_BYTES, lambda *_: None)
    reader.feed(piece(0, MAX_DATA_BYTES))
    assert "at most" in refused_as_bad_request(lambda: reader.feed(piece(MAX_DATA_BYTES, MAX_DATA_BYTES + 1)))


def test_an_empty_payload_is_complete_at_once() -> None:
    reader = PayloadReader(0, lambda *_: pytest.fail("nothing to write"))
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
def test_whatever_comes_the_payload_is_whole_or_refused(num_bytes: int, attempts: list[tuple[int, int, bool]]) -> None:
    """A model of the receiver: every byte is written once, in any order, none past the end."""
    payload = bytes(range(num_bytes))
    written: dict[int, int] = {}

    def write(offset: int, piece_of_payload: memoryview) -> None:
        written.update(enumerate(piece_of_payload, offset))

    def record(offset: int, length: int) -> None:
        write(offset, memoryview(payload)[offset : offset + length])

    reader = PayloadReader(num_bytes, write, record)
    for offset, length, is_outside in [*attempts, *((at, 1, False) for at in range(num_bytes))]:
        fits = length > 0 and offset + length <= num_bytes and written.keys().isdisjoint(range(offset, offset + length))
        before = dict(written)
        content = (payload + b"zzz")[offset : offset + length].ljust(length, b"z")
        with contextlib.nullcontext() if fits else pytest.raises(ParamServerError):
            reader.feed(out_of_band(offset, length) if is_outside else Frame(None, None, offset, memoryview(content)))
        assert len(written) == reader.received
        assert fits or written == before
    assert reader.is_complete
    assert bytes(value for _, value in sorted(written.items())) == payload


def test_a_payload_in_dust_is_refused_before_it_costs_memory() -> None:
    """Every other byte: nothing joins. In order, the same small pieces are fine."""
    reader = PayloadReader(1 << 20, lambda *_: None)

    def scatter() -> None:
        for at in range(0, 1 << 20, 2):
            reader.feed(piece(at, 1))

    refused_as_bad_request(scatter)
    assert 1000 < reader.received < 10_000
    reader = PayloadReader(1 << 14, lambda *_: None)
    for at in range(1 << 14):
        reader.feed(piece(at, 1))
    assert reader.is_complete
