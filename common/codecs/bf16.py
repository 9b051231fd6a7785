"""float32 and float64 as bfloat16: half or a quarter of the bytes, 8 bits of mantissa.

bfloat16 has the range of float32, so a gradient neither overflows nor vanishes as it can in float16. Rounding is to
nearest even. Other dtypes are sent unchanged. All tensors of one dtype are contiguous, and start at a multiple of 8
bytes. There is no residual, because rounding errors are small and random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..tensors.layout import FlatRun, Kind, Layout
from .shared.by_tensor import ByTensor, aligned


class Bf16Codec(ByTensor):
    name = "bf16"
    has_feedback = False
    takes_weights = True
    aligns = False
    least = largest = math.inf

    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Encode all tensors of a dtype in one call, unless some tensors are left out."""
        if self.without:
            super().encode(layout, payload, out)
            return
        for run, target in self._places(layout, out):
            target.copy_(run.view(payload))

    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        if self.without:
            super().decode(layout, encoded, payload)
            return
        for run, source in self._places(layout, encoded):
            run.view(payload).copy_(source)

    def _places(self, layout: Layout, encoded: torch.Tensor) -> Iterator[tuple[FlatRun, torch.Tensor]]:
        """Yield every parameter run, and its part of `encoded`, [n] in the short dtype."""
        at = 0
        for run in layout.runs_of(Kind.PARAMETER):
            short = self.short(run.dtype)
            at = aligned(at)
            end = at + run.num_elements * short.itemsize
            yield run, encoded[at:end].view(short)
            at = end


ENTRY = Bf16Codec
