"""2 bits for each value and a scale for 256 values: 15.06 times fewer bytes.

Meant for differences of many local steps, with error feedback (MuLoCo, Thérien et al. 2025, arXiv:2505.23725). A piece
of n values is cut into blocks of 256. The four levels of a block are -1.5, -0.5, 0.5 and 1.5 times its scale. For
normal values, the best distance between equidistant levels is 0.9957 standard deviations (Max 1960, "Quantizing for
minimum distortion"). With r, the root mean square of the block, q = clamp(floor(c / (0.9957 r)), -2, 1). The scale s =
sum(c (q + 0.5)) / sum((q + 0.5)^2), float32, makes the residual smallest.

The payload has the scales of all blocks, then the codes q as two bits (two's complement). A byte has four codes, lowest
bits first, and the last byte is padded with 0. A code is decoded as (q + 0.5) s.
"""

from __future__ import annotations

import torch

from .shared.by_tensor import ROOM, TINY, InBlocks, sizes_of

_PER_BYTE = 4
_MIDDLE = 0.5  # level minus code
_APART = 0.9957  # distance of levels, in standard deviations


class Q2Codec(InBlocks):
    name = "q2"
    bits = 2

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        for block, scales, packed in self.parts(values, out):
            levels = _levels(block, scales)
            codes = ROOM.of("code", block.shape, torch.int8).copy_(levels).bitwise_and_(3).view(torch.uint8).view(-1)
            if missing := -len(codes) % _PER_BYTE:
                codes = torch.nn.functional.pad(codes, (0, missing))
            packed.copy_(codes[::_PER_BYTE])
            for at in range(1, _PER_BYTE):
                packed.bitwise_or_(codes[at::_PER_BYTE] << 2 * at)

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        for block, scales, packed in self.parts(out, encoded):
            codes = ROOM.of("levels", (len(packed), _PER_BYTE), torch.int8)
            for at in range(_PER_BYTE):  # the shift down extends the sign, which is the upper of the two bits
                codes[:, at] = (packed.view(torch.int8) << 6 - 2 * at) >> 6
            block.view(-1).copy_(codes.view(-1)[: block.numel()])
            block.add_(_MIDDLE).mul_(scales[:, None])


def _levels(block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of float32 [blocks, n], -2 to 1, and write the scales to `scales`, float32 [blocks]."""
    sizes = sizes_of(block, scales).clamp(min=TINY)
    part = torch.mul(block, sizes.reciprocal()[:, None], out=ROOM.of("part", block.shape))  # squares stay finite
    spread = torch.linalg.vector_norm(part, dim=1).mul_(_APART / block.shape[1] ** 0.5).clamp_(min=TINY)
    levels = torch.mul(part, spread.reciprocal_()[:, None], out=ROOM.of("work", block.shape))
    levels.floor_().clamp_(-2, 1).add_(_MIDDLE)
    torch.div(part.mul_(levels).sum(1), levels.square().sum(1), out=scales)
    scales.mul_(sizes)
    return levels.sub_(_MIDDLE)


ENTRY = Q2Codec
