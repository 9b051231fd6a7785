"""8 bits a value and a scale for 256 of them: 3.94 times fewer bytes, an error of at most half a step.

Of a piece of n values: the scales of its blocks of 256, s = max|c| / 127, float32; then n times q = round(c / s), int8,
half to even. Decoded is q s. (Where s is no normal float32, q is smaller: whoever encodes divides by at least 2^-126.)
"""

from __future__ import annotations

import torch

from .shared.by_tensor import ROOM, ByTensor, blocks_of

_BLOCK = 256
_SCALE_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny


class Int8Codec(ByTensor):
    name = "int8"

    def size(self, num_elements: int) -> int:
        return -(-num_elements // _BLOCK) * _SCALE_BYTES + num_elements

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, levels = self._parts(out, len(values))
        for first, block in blocks_of(values, _BLOCK):
            scale, place = self._places(scales, levels, first, block)
            work = torch.abs(block, out=ROOM.of("work", block.shape))
            torch.amax(work, 1, out=scale)
            scale.div_(127)
            torch.mul(block, scale.clamp(min=_TINY).reciprocal_()[:, None], out=work)
            place.copy_(work.round_())

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        scales, levels = self._parts(encoded, len(out))
        for first, block in blocks_of(out, _BLOCK):
            scale, place = self._places(scales, levels, first, block)
            block.copy_(place).mul_(scale[:, None])

    def _parts(self, encoded: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, float32 [blocks], and levels, int8 [n]."""
        num_bytes = len(encoded) - num_elements
        return encoded[:num_bytes].view(torch.float32), encoded[num_bytes:].view(torch.int8)

    def _places(
        self, scales: torch.Tensor, levels: torch.Tensor, first: int, block: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of `block`, [blocks, 256], from block `first` on."""
        at = first * _BLOCK
        return scales[first : first + len(block)], levels[at : at + block.numel()].view(block.shape)


ENTRY = Int8Codec
