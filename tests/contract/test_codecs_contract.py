"""Every codec keeps the promises of common/codecs/base.py. Codecs come from the registry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.codecs.shared.by_tensor import ByTensor, pieces_of
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec, new_payload

ALL_CODECS = CODECS.names()
LEAVES_OUT = [name for name in ALL_CODECS if CODECS.load(name).has_feedback]
ROUNDS = [name for name in ALL_CODECS if name not in LEAVES_OUT]
FLOATS = ("float32", "float64", "float16", "bfloat16")
GUARD = 0xA5


def payload_of(layout: Layout, values: dict[str, torch.Tensor]) -> torch.Tensor:
    payload = new_payload(layout.total_bytes)
    for spec, view in layout.views(payload):
        if spec.name in values:
            view.copy_(values[spec.name])
    return payload


def round_trip(codec: Any, layout: Layout, payload: torch.Tensor) -> torch.Tensor:
    """encode and decode with memory of exactly the announced size, guarded on both sides."""
    size = codec.encoded_bytes(layout)
    assert size >= 0
    guarded = torch.full((64 + size + 64,), GUARD, dtype=torch.uint8)
    before = payload.clone()
    encoder = codec.encoder(layout)
    encoder.begin(payload, guarded[64 : 64 + size])
    assert torch.equal(payload, before), "encode changed the payload"
    assert (guarded[:64] == GUARD).all() and (guarded[64 + size :] == GUARD).all(), "encode wrote past its memory"
    encoded = guarded[64 : 64 + size].clone()
    result = torch.full((layout.total_bytes + 64,), GUARD, dtype=torch.uint8)
    codec.decode(layout, encoded, result[: layout.total_bytes])
    assert torch.equal(encoded, guarded[64 : 64 + size]), "decode changed what it reads"
    assert (result[layout.parameter_bytes :] == GUARD).all(), "decode wrote past the parameters"
    again = torch.zeros(size, dtype=torch.uint8)
    encoder.rollback()
    encoder.begin(payload, again)
    # Gaps between runs may hold anything; what matters decodes to the same.
    second = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    codec.decode(layout, again, second)
    for (spec, item), (_, two) in zip(layout.views(result), layout.views(second), strict=True):
        if spec.kind is Kind.PARAMETER:
            assert torch.equal(item.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)), (
                "a rollback remembers"
            )
    return result


def expected(codec: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not encoded by itself: rounded to the codec's half precision, if it has one."""
    if not isinstance(codec, ByTensor) or tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return tensor.to(codec.fallback_dtype).to(tensor.dtype)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    specs = []
    for index in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from([Kind.PARAMETER, Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN]))
        dtype = draw(st.sampled_from(FLOATS if kind is Kind.PARAMETER else tuple(DTYPES)))
        shape = draw(st.sampled_from([(), (0,), (1,), (3,), (7, 5), (2, 0, 3), (33,), (1, 1, 1), (63, 2), (67, 67)]))
        specs.append(TensorSpec(f"t{index}", kind, dtype, shape))
    return Layout(specs)


@pytest.mark.parametrize("name", ALL_CODECS)
def test_a_codec_is_called_by_its_own_name(name: str) -> None:
    assert CODECS.load(name)().name == name


@pytest.mark.parametrize("name", ALL_CODECS)
@given(layout=layouts(), seed=st.integers(0, 1000), scale=st.sampled_from([1.0, 1e-30, 1e4]))
@settings(max_examples=40, deadline=None)
def test_decoding_gives_back_what_was_encoded(name: str, layout: Layout, seed: int, scale: float) -> None:
    codec = CODECS.load(name)()
    generator = torch.Generator().manual_seed(seed)
    values = {
        spec.name: (torch.randn(spec.shape, generator=generator, dtype=torch.float64) * scale).to(DTYPES[spec.dtype])
        for spec in layout.specs
        if spec.kind is Kind.PARAMETER
    }
    result = round_trip(codec, layout, payload_of(layout, values))
    for spec, view in layout.views(result[: layout.total_bytes]):
        if spec.kind is Kind.PARAMETER:
            if isinstance(codec, ByTensor) and codec.encodes(spec):
                norm = float(values[spec.name].double().norm())
                # The signs of 1-bit Adam keep the norm, so they may point another way.
                most = norm * ((math.sqrt(2) if codec.name == "onebit_adam" else 1) + 0.01) + (
                    1e-4 if "16" in spec.dtype else 1e-30
                )
                assert float((view.double() - values[spec.name].double()).norm()) <= most, spec
            else:
                assert torch.equal(view, expected(codec, values[spec.name])), spec


@pytest.mark.parametrize("name", ALL_CODECS)
@given(layout=layouts(), data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_goes_in_parts_is_the_same_part_by_part(name: str, layout: Layout, data: st.DataObject) -> None:
    codec = CODECS.load(name)()
    if not isinstance(codec, ByTensor):
        return
    payload = torch.randn(layout.total_bytes // 2 + 8).view(torch.uint8)[: layout.total_bytes].nan_to_num_()
    whole, parts = (torch.zeros(codec.encoded_bytes(layout), dtype=torch.uint8) for _ in range(2))
    for run in layout.runs_of(Kind.PARAMETER):
        run.view(payload).copy_(torch.randn(run.num_elements))
    codec.encoder(layout).begin(payload, whole)
    coder: Any = codec.encoder(layout)
    tensors = pieces_of(codec, layout)
    assert len(tensors) == sum(spec.kind is Kind.PARAMETER for spec in layout.specs)
    for index in data.draw(st.permutations(range(len(tensors)))):
        for piece in tensors[index]:
            coder.write(piece, piece.of_payload(payload), parts)
    assert torch.equal(whole, parts)
    at = 0
    for piece in (piece for pieces in tensors for piece in pieces):
        assert at <= piece.start < piece.end and piece.start - at < 8, "pieces follow one another"
        at = piece.end
    assert at == codec.encoded_bytes(layout)


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_at_the_edges(name: str, dtype: str) -> None:
    """Signed zeros, subnormals, the largest and smallest; NaN and Inf stay what they are, so the server sees them."""
    codec = CODECS.load(name)()
    info = torch.finfo(DTYPES[dtype])
    edges = [0.0, -0.0, info.tiny, -info.tiny, info.max, info.min, 1 + info.eps, math.pi, math.nan, math.inf, -math.inf]
    values = torch.tensor(edges, dtype=torch.float64).to(DTYPES[dtype])
    layout = Layout([TensorSpec("x", Kind.PARAMETER, dtype, (len(edges),))])
    result = round_trip(codec, layout, payload_of(layout, {"x": values}))
    ((_, view),) = layout.views(result[: layout.total_bytes])
    wanted = expected(codec, values)
    assert torch.equal(torch.nan_to_num(view, nan=7.0), torch.nan_to_num(wanted, nan=7.0))
    assert torch.equal(torch.signbit(view[:2]), torch.tensor([False, True]))
    assert view[8].isnan() and view[9] == math.inf and view[10] == -math.inf


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_elements", [1, 2, 7, 8, 63, 1001])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_anywhere_is_still_bad_after_decoding(
    name: str, dtype: str, num_elements: int, bad: float
) -> None:
    codec = CODECS.load(name)()
    layout = Layout([TensorSpec("x", Kind.PARAMETER, dtype, (num_elements,))])
    values = torch.ones(num_elements, dtype=DTYPES[dtype])
    for at in {0, num_elements // 2, num_elements - 1}:
        spoiled = values.clone()
        spoiled[at] = bad
        result = round_trip(codec, layout, payload_of(layout, {"x": spoiled}))
        ((_, view),) = layout.views(result[: layout.total_bytes])
        assert torch.equal(~view.isfinite(), ~spoiled.isfinite())


@pytest.mark.parametrize("name", ALL_CODECS)
def test_the_size_depends_on_the_parameters_only(name: str) -> None:
    codec = CODECS.load(name)()
    parameters = [TensorSpec("w", Kind.PARAMETER, "float32", (13,)), TensorSpec("d", Kind.PARAMETER, "float64", (3,))]
    others = [TensorSpec("n", Kind.BUFFER, "int64", (5,)), TensorSpec("f", Kind.FROZEN, "float32", (99,))]
    assert codec.encoded_bytes(Layout(parameters)) == codec.encoded_bytes(Layout(others + parameters))
    assert codec.encoded_bytes(Layout(others)) == 0
    assert 0 < codec.encoded_bytes(Layout(parameters)) <= Layout(parameters).parameter_bytes + 64


def test_bf16_halves_float32() -> None:
    codec = CODECS.load("bf16")()
    assert codec.encoded_bytes(Layout([TensorSpec("w", Kind.PARAMETER, "float32", (1000,))])) == 2000
    assert codec.encoded_bytes(Layout([TensorSpec("w", Kind.PARAMETER, "float64", (1000,))])) == 2000


def test_bf16_rounds_to_nearest_even() -> None:
    """As torch does, which a client in another language can rebuild: the proto names no other rounding."""
    codec = CODECS.load("bf16")()
    eps = 2.0**-8
    values = torch.tensor([1 + eps, 1 + 3 * eps, 1 + eps * 1.001, -(1 + eps)])
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (4,))])
    result = round_trip(codec, layout, payload_of(layout, {"w": values}))
    ((_, view),) = layout.views(result[: layout.total_bytes])
    assert view.tolist() == [1.0, 1 + 4 * eps, 1 + 2 * eps, -1.0]
