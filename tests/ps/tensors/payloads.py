"""Payloads of random values, and a layout that has everything."""

from __future__ import annotations

import torch

from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN

# All kinds, several dtypes, a tied tensor, some of no dimension and one of no elements. Small windows end in the middle
# of tensors and of runs; some hold several of each, some only buffers.
MIXED = Layout([
    TensorSpec("a", P, "float32", (37, 11), ("tied.a", "again.a")),
    TensorSpec("frozen", F, "float32", (19,)),
    TensorSpec("b/c", P, "float32", (3,)),
    TensorSpec("c", P, "float64", (101,)),
    TensorSpec("d", P, "float32", (1000,)),
    TensorSpec("e", P, "bfloat16", (333,)),
    TensorSpec("f", P, "float32", ()),
    TensorSpec("nothing", P, "float32", (0, 4)),
    TensorSpec("untrained", P, "float32", (5,)),
    TensorSpec("mean", B, "float32", (257,)),
    TensorSpec("var", B, "float64", (65,)),
    TensorSpec("count", B, "int64", ()),
    TensorSpec("counts", B, "int64", (40,)),
    TensorSpec("seen", B, "bool", (70,)),
])  # fmt: skip


def random_payload(layout: Layout, seed: int, is_contribution: bool = True) -> torch.Tensor:
    """Gaps hold garbage, as they do in memory that is lent again."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        dtype = DTYPES[spec.dtype]
        if dtype.is_floating_point:
            view.copy_(torch.randn(spec.shape, generator=generator, dtype=torch.float64))
        else:
            view.copy_(torch.randint(0, 2 if dtype == torch.bool else 100, spec.shape, generator=generator))
    return payload[: layout.exchange_bytes].clone() if is_contribution else payload
