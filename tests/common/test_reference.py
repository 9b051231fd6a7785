"""A server that approaches and workers that follow hold the same bits, of any dtype; and with no new versions they come
near to the weights."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.codecs.base import payload_bytes
from paramserver.common.codecs.shared.reference import approach, check_sum, distance, follow, moves_reference
from paramserver.common.registry import CODECS
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload

DIFFERENT = Layout([
    TensorSpec("w", Kind.PARAMETER, "float32", (70, 301)), TensorSpec("b", Kind.PARAMETER, "float32", (301,)),
    TensorSpec("d", Kind.PARAMETER, "float64", (33, 65)), TensorSpec("h", Kind.PARAMETER, "bfloat16", (64, 65)),
    TensorSpec("f", Kind.PARAMETER, "float16", (40, 130)), TensorSpec("e", Kind.PARAMETER, "float32", (0, 5)),
    TensorSpec("mean", Kind.BUFFER, "float32", (7,)), TensorSpec("count", Kind.BUFFER, "int64", ()),
])  # fmt: skip
PLAIN = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (256, 512))])
NAMES = [name for name in CODECS.names() if moves_reference(CODECS.load(name)())]


def random_payload(layout: Layout, chance: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    payload = new_payload(layout.exchange_bytes)
    for _, view in layout.views(payload):
        view.copy_(scale * torch.randn(view.shape, generator=chance, dtype=torch.float64))
    return payload


def test_which_codecs_move_a_reference() -> None:
    assert {"int8", "q4", "topk", "sparse"} <= set(NAMES)
    assert not {"raw", "bf16", "fp16"} & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_have_the_same_bits_of_every_dtype(name: str) -> None:
    codec, chance = CODECS.load(name)(), torch.Generator().manual_seed(0)
    weights = random_payload(DIFFERENT, chance)
    encoder = codec.encoder(DIFFERENT)
    mine, theirs, out = weights.clone(), weights.clone(), new_payload(payload_bytes(codec, DIFFERENT))
    for _ in range(5):
        for (_, view), (_, step) in zip(
            DIFFERENT.views(weights), DIFFERENT.views(random_payload(DIFFERENT, chance, 0.01)), strict=True
        ):
            view.add_(step)
        before = weights.clone()
        approach(codec, encoder, weights, mine, out)
        follow(codec, DIFFERENT, out, theirs)
        assert torch.equal(weights, before)
        assert torch.equal(mine, theirs)
        assert check_sum(DIFFERENT, mine) == check_sum(DIFFERENT, theirs)
        assert torch.equal(mine[DIFFERENT.parameter_bytes :], weights[DIFFERENT.parameter_bytes :])


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8", 0.0073), ("q4", 0.214), ("topk", 0.965), ("sparse", 0.78), ("q2", 0.36), ("powersgd", 1.0)],
)
def test_with_no_new_versions_every_difference_comes_nearer(name: str, most: float) -> None:
    """To what is left of values from N(0, 1) after one: N2, section 3.3."""
    codec, weights = CODECS.load(name)(), random_payload(PLAIN, torch.Generator().manual_seed(1))
    encoder, out = codec.encoder(PLAIN), new_payload(payload_bytes(codec, PLAIN))
    reference = new_payload(PLAIN.exchange_bytes)
    left = [float(weights.view(torch.float32).norm())]
    for _ in range(3):
        approach(codec, encoder, weights, reference, out)
        left.append(float((weights.view(torch.float32) - reference.view(torch.float32)).norm()))
        assert distance(PLAIN, weights, reference) == pytest.approx(left[-1] / left[0], rel=1e-5)
    assert left[1] < most * left[0]
    assert left[0] > left[1] > left[2] > left[3]
