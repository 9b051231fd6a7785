"""2 bits a value and a scale for 256 of them, of four levels: 15.06 times fewer bytes, as `int2`, and less is left out.

Of each block of 256 values the levels are -1.5, -0.5, 0.5 and 1.5 times its scale, the best four at equal distances
where values are normal (Max 1960, "Quantizing for minimum distortion": 0.9957 deviations apart): with r, the root of
the block's mean square, q = clamp(floor(c / (0.9957 r)), -2, 1). The scale is then the one with which least is left
out: s = sum(c (q + 0.5)) / sum((q + 0.5)^2), float32. Sent as `int2` sends its own; decoded is (q + 0.5) s.
"""

from __future__ import annotations

import torch

from ..shared.by_tensor import ROOM, sizes_of
from .int2 import Int2Codec

_APART = 0.9957
_TINY = torch.finfo(torch.float32).tiny


class Q2Codec(Int2Codec):
    name = "q2"
    above = 0.5

    def _levels(self, block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        sizes = sizes_of(block, scales).clamp(min=_TINY)
        part = torch.mul(block, sizes.reciprocal()[:, None], out=ROOM.of("part", block.shape))  # squares stay finite
        spread = torch.linalg.vector_norm(part, dim=1).mul_(_APART / block.shape[1] ** 0.5).clamp_(min=_TINY)
        levels = torch.mul(part, spread.reciprocal_()[:, None], out=ROOM.of("work", block.shape))
        levels.floor_().clamp_(-2, 1).add_(self.above)
        torch.div(part.mul_(levels).sum(1), levels.square().sum(1), out=scales)
        scales.mul_(sizes)
        return levels.sub_(self.above)


ENTRY = Q2Codec
