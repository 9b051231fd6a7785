"""Codecs of pieces against references of a few lines each, from what their files say: what another language would
write."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload


def blocks(values: np.ndarray, size: int = 256) -> list[np.ndarray]:
    return [values[at : at + size] for at in range(0, len(values), size)]


def int8_reference(encoded: bytes, n: int) -> list[float]:
    scales = np.frombuffer(encoded, "<f4", -(-n // 256))
    levels = np.frombuffer(encoded, "i1", n, 4 * len(scales))
    return [float(np.float32(q) * scales[i // 256]) for i, q in enumerate(levels)]


def q4_reference(encoded: bytes, n: int) -> list[float]:
    scales, at = struct.unpack_from(f"<{-(-n // 256)}f", encoded), 4 * -(-n // 256)
    found = []
    for i in range(n):
        code = encoded[at + i // 2] >> (4 * (i % 2)) & 15
        level, sign = code & 7, -1 if code & 8 else 1
        found.append(sign * (2.0 ** (level - 7) if level else 0.0) * scales[i // 256])
    return found


def q2_reference(encoded: bytes, n: int) -> list[float]:
    scales = np.frombuffer(encoded, "<f4", -(-n // 256))
    codes = [encoded[4 * len(scales) + i // 4] >> (2 * (i % 4)) & 3 for i in range(n)]
    return [float(np.float32((0.5, 1.5, -1.5, -0.5)[code]) * scales[i // 256]) for i, code in enumerate(codes)]


def q2_nearest(block: np.ndarray) -> list[float]:
    block = block.astype(np.float64)
    apart = 0.9957 * math.sqrt((block**2).mean())
    levels = np.clip(np.floor(block / apart), -2, 1) + 0.5 if apart else np.full(len(block), 0.5)
    return list(levels * (block @ levels) / (levels @ levels))


def int8_nearest(block: np.ndarray) -> list[float]:
    scale = float(np.abs(block).max()) / 127
    return [round(value / scale) * scale if scale else 0.0 for value in block.tolist()]


def q4_nearest(block: np.ndarray) -> list[float]:
    largest, found = float(np.abs(block).max()), []
    for value in block.tolist():
        level = round(math.log2(abs(value) / largest)) + 7 if value else 0
        found.append(math.copysign(2.0 ** (level - 7) * largest, value) if level > 0 else 0.0)
    return found


def chunked(values: np.ndarray, share: Fraction | int, size: int = 4096) -> list[tuple[int, list[int]]]:
    """(where a chunk begins, places in it of what is kept)."""
    found = []
    for at in range(0, len(values), size):
        chunk = values[at : at + size]
        order = sorted(range(len(chunk)), key=lambda i: -abs(chunk[i]))
        found.append((at, sorted(order[: -(-len(chunk) // share)])))
    return found


def topk_nearest(values: np.ndarray) -> np.ndarray:
    found = np.zeros_like(values)
    for at, places in chunked(values, 100):
        found[at : at + 4096][places] = values[at : at + 4096][places]
    return found


def sparse_nearest(values: np.ndarray) -> np.ndarray:
    found, places = np.zeros_like(values), [at + i for at, kept in chunked(values, Fraction(64, 7), 64) for i in kept]
    kept = values[places]
    levels = np.clip(np.round((kept - kept.mean()) / (1.5 * kept.std(ddof=1)) + 2), 0, 3)
    found[places] = [kept[levels == level].mean() for level in levels]
    return found


def signs_nearest(values: np.ndarray) -> np.ndarray:
    return np.where(values < 0, -1, 1) * np.sqrt((values**2).mean())


WHOLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "topk": topk_nearest, "sparse": sparse_nearest, "onebit_adam": signs_nearest,
}  # fmt: skip


def through(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoded and decoded."""
    codec, out = CODECS.load(name)(), torch.full_like(values, math.nan)
    encoded = torch.full((codec.size(len(values)),), 0xA5, dtype=torch.uint8)
    codec.encode_piece(values, encoded)
    codec.decode_piece(encoded, out)
    return encoded, out


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("n", [4096, 4097, 8192 + 130])
def test_a_tensor_is_what_its_file_says(name: str, n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    encoded, decoded = through(name, values)
    assert np.allclose(decoded.numpy(), WHOLE[name](values.double().numpy()), rtol=1e-5)
    assert len(encoded) == {
        "topk": 6 * (n // 4096 * 41 + -(-(n % 4096) // 100)),
        "sparse": 16 + 4 * -(-(n // 64 * 7 + -(-(n % 64) * 7 // 64)) // 4),
    }.get(name, 4 + -(-n // 8))


@pytest.mark.parametrize("name", ["topk", "sparse"])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
def test_values_that_are_all_the_same(name: str, value: float) -> None:
    """No spread, and no largest."""
    _, decoded = through(name, torch.full((5000,), value))
    assert decoded.isfinite().all() and set(decoded.tolist()) <= {0.0, value}
    assert not value or int((decoded != 0).sum()) == (41 + 10 if name == "topk" else 5000 // 64 * 7 + 1)
    sparse = torch.zeros(5000)
    sparse[4999] = 3.0
    assert torch.equal(through(name, sparse)[1] != 0, sparse != 0) or name == "sparse"


@pytest.mark.parametrize("name", [*WHOLE, *("int8", "q4", "q2")])
@given(seed=st.integers(0, 2**31), n=st.sampled_from([4096, 5000]))
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_decoded_or_refused(name: str, seed: int, n: int) -> None:
    codec, generator = CODECS.load(name)(), torch.Generator().manual_seed(seed)
    encoded = through(name, torch.randn(n, generator=generator))[0]
    for position in torch.randint(len(encoded), (seed % 9,), generator=generator).tolist():
        encoded[position] = int(torch.randint(256, (), generator=generator))
    with suppress(ValueError):  # places that do not ascend
        codec.decode_piece(encoded, torch.zeros(n))


@pytest.mark.parametrize("name", ["topk", "sparse"])
def test_places_that_are_none_are_refused(name: str) -> None:
    codec, n = CODECS.load(name)(), 4096 + 700
    spoiled = [through(name, torch.randn(n))[0] for _ in range(3)]
    if name == "topk":
        places = [item[48 * 4 :].view(torch.int16) for item in spoiled]
        places[0][1], places[1][-1], places[2][0] = places[0][0], 700, -1
    else:
        first = 16
        spoiled[0][first : first + 3] = 0  # twice the place 0
        spoiled[1][first + 3 * 37 + 1 :][:2] = 255  # of the last two in the shorter chunk
        spoiled[2][first : first + 3] = 255
    for entry in spoiled:
        with pytest.raises(ValueError, match="positions that do not ascend"):
            codec.decode_piece(entry, torch.zeros(n))


DECODERS: dict[str, Callable[[bytes, int], list[float]]] = {
    "int8": int8_reference, "q4": q4_reference, "q2": q2_reference,
}  # fmt: skip
NEAREST: dict[str, Callable[[np.ndarray], list[float]]] = {"int8": int8_nearest, "q4": q4_nearest, "q2": q2_nearest}


@pytest.mark.parametrize("name", DECODERS)
@given(n=st.sampled_from([1, 2, 7, 255, 256, 257, 600, 1023]), seed=st.integers(0, 99), power=st.integers(-30, 30))
@settings(max_examples=40, deadline=None)
def test_a_piece_is_what_its_file_says(name: str, n: int, seed: int, power: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    values[:: 3 + seed % 5] = 0.0
    encoded, decoded = through(name, values)
    assert decoded.tolist() == DECODERS[name](encoded.numpy().tobytes(), n)
    near = [item for block in blocks(values.numpy()) for item in NEAREST[name](block)]
    off = [index for index in range(n) if not math.isclose(decoded[index], near[index], rel_tol=1e-5)]
    assert len(off) <= 0.01 * n, "halves may round either way, in float32"


@pytest.mark.parametrize(
    ("name", "ratio", "error"),
    [
        ("int8", 3.94, 0.0069), ("q4", 7.76, 0.203), ("q2", 15.06, 0.345), ("topk", 66.6, 0.955),
        ("sparse", 36.55, 0.733), ("onebit_adam", 31.9, 0.636),
    ],
)  # fmt: skip
def test_bytes_and_error_of_normal_values(name: str, ratio: float, error: float) -> None:
    codec = CODECS.load(name)()
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (256, 1024))])
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    encoded, payload = new_payload(codec.encoded_bytes(layout)), new_payload(layout.total_bytes)
    codec.encode(layout, values.view(torch.uint8), encoded)
    codec.decode(layout, encoded, payload)
    assert layout.parameter_bytes / len(encoded) == pytest.approx(ratio, rel=0.01)
    assert float((payload.view(torch.float32) - values).norm() / values.norm()) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("name", [*WHOLE, *DECODERS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_seen_and_of_codecs_in_blocks_all_of_its_block_is_bad(name: str, bad: float) -> None:
    for at in (0, 255, 256, 4095, 4999):
        values = torch.randn(5000)
        values[at] = bad
        is_bad = ~through(name, values)[1].isfinite()
        block = is_bad[at // 256 * 256 :][:256]
        assert is_bad.any() and (name in WHOLE or (block.all() and is_bad.sum() == len(block)))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-126, 2.0**-127 * 190, 3.4e38])
def test_the_smallest_and_the_largest(name: str, size: float) -> None:
    values = torch.full((300,), size)
    values[1::2] *= -1 if size else 1
    encoded, decoded = through(name, values)
    assert (decoded - values).abs().max() <= max(1.5e-36, 1e-5 * size)
    assert size or not encoded.any(), "zeros are zero bytes, which need not travel"
