"""Payloads of random values."""

from __future__ import annotations

import torch

from paramserver.common.tensors.layout import DTYPES, Layout


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
