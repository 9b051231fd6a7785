"""8 bits for each value and a scale for 256 values: 3.94 times fewer bytes, an error of at most half a step.

A piece of n values has the scales of its blocks of 256, s = max|c| / 127, float32; then n levels q = round(c / s),
int8, half to even. A level is decoded as q s. The encoder divides by at least 2^-126, so q is smaller if s is
subnormal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .shared.by_tensor import ROOM, ByTensor, blocks_of, sizes_of

_BLOCK = 256
_SCALE_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny
# A float32 of this size has no fraction. So adding it rounds, and the lowest byte of the sum's bits is the level.
_ROUND = torch.full((1, _BLOCK), 1.5 * 2**23)


class Int8Codec(ByTensor):
    name = "int8"

    def size(self, num_elements: int) -> int:
        return -(-num_elements // _BLOCK) * _SCALE_BYTES + num_elements

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        for block, scale, codes in self._parts(values, out):
            sizes_of(block, scale).div_(127)
            steps = scale.clamp(min=_TINY).reciprocal_()[:, None]
            torch.addcmul(_ROUND[:, : block.shape[1]], block, steps, out=ROOM.of("work", block.shape))
            codes.copy_(ROOM.of("work", block.shape, torch.int32))

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        for block, scale, codes in self._parts(out, encoded):
            block.copy_(codes).mul_(scale[:, None])

    def _parts(
        self, values: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (values, scales, levels) of the whole blocks, then of a shorter block.

        Values are [blocks, n], scales float32 [blocks], levels int8 [blocks, n].
        """
        num_bytes = len(encoded) - len(values)
        scales, levels = encoded[:num_bytes].view(torch.float32), encoded[num_bytes:].view(torch.int8)
        for (first, block), (_, codes) in zip(blocks_of(values, _BLOCK), blocks_of(levels, _BLOCK), strict=True):
            yield block, scales[first : first + len(block)], codes


ENTRY = Int8Codec
