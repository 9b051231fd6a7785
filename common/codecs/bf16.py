"""float32 and float64 as bfloat16: half or a quarter of the bytes, 8 bits of mantissa.

The range of float32 is kept, so a gradient neither overflows nor vanishes as it can in float16; the rounding is to
nearest even. Other dtypes travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..tensors.layout import FlatRun, Kind, Layout
from .base import Stateless

_WIDE = (torch.float32, torch.float64)


def _places(layout: Layout) -> Iterator[tuple[FlatRun, int, int]]:
    """(run, start, end) of every parameter run in the encoded part."""
    at = 0
    for run in layout.runs_of(Kind.PARAMETER):
        at = -(-at // 8) * 8  # an element of any dtype may be viewed in place
        end = at + run.num_elements * (2 if run.dtype in _WIDE else run.dtype.itemsize)
        yield run, at, end
        at = end


class Bf16Codec(Stateless):
    name = "bf16"
    half = torch.bfloat16

    def encoded_bytes(self, layout: Layout) -> int:
        return max((end for _, _, end in _places(layout)), default=0)

    def encode(self, layout: Layout, body: torch.Tensor, out: torch.Tensor) -> None:
        for run, start, end in _places(layout):
            out[start:end].view(self._wire_dtype(run)).copy_(run.view(body))

    def decode(self, layout: Layout, encoded: torch.Tensor, body: torch.Tensor) -> None:
        for run, start, end in _places(layout):
            run.view(body).copy_(encoded[start:end].view(self._wire_dtype(run)))

    def _wire_dtype(self, run: FlatRun) -> torch.dtype:
        return self.half if run.dtype in _WIDE else run.dtype


ENTRY = Bf16Codec
