"""8 bits for each value and a scale for 256 values: 3.94 times fewer bytes, an error of at most half a step.

A piece of n values has the scales of its blocks of 256, s = max|c| / 127, float32; then n levels q = round(c / s),
int8, half to even. A level is decoded as q s. The encoder divides by at least 2^-126, so q is smaller if s is
subnormal.
"""

from __future__ import annotations

import torch

from .shared.by_tensor import BLOCK, ROOM, TINY, InBlocks, sizes_of

# A float32 of this size has no fraction. So adding it rounds, and the lowest byte of the sum's bits is the level.
_ROUND = torch.full((1, BLOCK), 1.5 * 2**23, device="cpu")


class Int8Codec(InBlocks):
    name = "int8"
    bits = 8

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        for block, scale, codes in self.parts(values, out):
            sizes_of(block, scale).div_(127)
            steps = scale.clamp(min=TINY).reciprocal_()[:, None]
            torch.addcmul(_ROUND[:, : block.shape[1]], block, steps, out=ROOM.of("work", block.shape))
            codes.view(torch.int8).view(block.shape).copy_(ROOM.of("work", block.shape, torch.int32))

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        for block, scale, codes in self.parts(out, encoded):
            block.copy_(codes.view(torch.int8).view(block.shape)).mul_(scale[:, None])


ENTRY = Int8Codec
