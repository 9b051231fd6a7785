"""2 bits a value and a scale for 256 of them: 15.06 times fewer bytes.

For differences of many local steps, with what is left out added to the next ones (MuLoCo, Thérien et al. 2025,
arXiv:2505.23725, where it is next to no loss). Of a piece of n values: the scales of its blocks of 256, s = max|c|,
float32; then q = round(c / s), half to even, which is -1, 0 or 1, as two bits (two's complement), four in a byte, the
first one lowest, the last byte filled with 0. Decoded is q s.
"""

from __future__ import annotations

import torch

from ..shared.by_tensor import ROOM, ByTensor, blocks_of, sizes_of

_BLOCK = 256
_SCALE_BYTES = 4
_PER_BYTE = 4
_TINY = torch.finfo(torch.float32).tiny


class Int2Codec(ByTensor):
    name = "int2"
    suits_adaptive = suits_momentum = False
    above = 0.0  # what is decoded is so many scales above the code

    def size(self, num_elements: int) -> int:
        return -(-num_elements // _BLOCK) * _SCALE_BYTES + -(-num_elements // _PER_BYTE)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, packed = self._parts(out, len(values))
        for first, block in blocks_of(values, _BLOCK):
            levels = self._levels(block, scales[first : first + len(block)])
            codes = ROOM.of("code", block.shape, torch.int8).copy_(levels).bitwise_and_(3).view(torch.uint8).view(-1)
            if missing := -len(codes) % _PER_BYTE:
                codes = torch.nn.functional.pad(codes, (0, missing))
            place = packed[first * _BLOCK // _PER_BYTE :][: len(codes) // _PER_BYTE]
            place.copy_(codes[::_PER_BYTE])
            for at in range(1, _PER_BYTE):
                place.bitwise_or_(codes[at::_PER_BYTE] << 2 * at)

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        scales, packed = self._parts(encoded, len(out))
        for first, block in blocks_of(out, _BLOCK):
            place = packed[first * _BLOCK // _PER_BYTE :][: -(-block.numel() // _PER_BYTE)].view(torch.int8)
            levels = ROOM.of("levels", (len(place), _PER_BYTE), torch.int8)
            for at in range(_PER_BYTE):  # shifted up and down again, so that the upper of the two bits is the sign
                levels[:, at] = (place << 6 - 2 * at) >> 6
            block.view(-1).copy_(levels.view(-1)[: block.numel()])
            if self.above:
                block.add_(self.above)
            block.mul_(scales[first : first + len(block), None])

    def _levels(self, block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Of float32 [blocks, n] the codes, -2 to 1; the scales go to `scales`, float32 [blocks]."""
        steps = sizes_of(block, scales).clamp(min=_TINY).reciprocal_()[:, None]
        return torch.mul(block, steps, out=ROOM.of("work", block.shape)).round_()

    def _parts(self, encoded: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, float32 [blocks], and packed codes, uint8 [a quarter of n]."""
        num_bytes = len(encoded) - -(-num_elements // _PER_BYTE)
        return encoded[:num_bytes].view(torch.float32), encoded[num_bytes:]


ENTRY = Int2Codec
