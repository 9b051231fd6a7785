"""2 bits a value and a scale for 256 of them: 15.06 times fewer bytes.

For differences of many local steps, with what is left out added to the next ones (MuLoCo, Thérien et al. 2025,
arXiv:2505.23725). A piece of n values is cut into blocks of 256. The four levels of a block are -1.5, -0.5, 0.5 and 1.5
times its scale. Levels at equal distances are best for normal values when they are 0.9957 deviations apart (Max 1960,
"Quantizing for minimum distortion"): with r, the root of the block's mean square, q = clamp(floor(c / (0.9957 r)), -2,
1). The scale s = sum(c (q + 0.5)) / sum((q + 0.5)^2), float32, then leaves the least out.

The payload has the scales of all blocks, then the codes q as two bits (two's complement), four in a byte, the first one
lowest, the last byte filled with 0. A code is decoded as (q + 0.5) s.
"""

from __future__ import annotations

import torch

from .shared.by_tensor import ROOM, ByTensor, blocks_of, sizes_of

_BLOCK = 256
_SCALE_BYTES = 4
_PER_BYTE = 4
_ABOVE = 0.5  # a level is so far above its code
_APART = 0.9957
_TINY = torch.finfo(torch.float32).tiny


class Q2Codec(ByTensor):
    name = "q2"
    suits_adaptive = suits_momentum = False

    def size(self, num_elements: int) -> int:
        return -(-num_elements // _BLOCK) * _SCALE_BYTES + -(-num_elements // _PER_BYTE)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, packed = self._parts(out, len(values))
        for first, block in blocks_of(values, _BLOCK):
            levels = _levels(block, scales[first : first + len(block)])
            codes = ROOM.of("code", block.shape, torch.int8).copy_(levels).bitwise_and_(3).view(torch.uint8).view(-1)
            if missing := -len(codes) % _PER_BYTE:
                codes = torch.nn.functional.pad(codes, (0, missing))
            target = packed[first * _BLOCK // _PER_BYTE :][: len(codes) // _PER_BYTE]
            target.copy_(codes[::_PER_BYTE])
            for at in range(1, _PER_BYTE):
                target.bitwise_or_(codes[at::_PER_BYTE] << 2 * at)

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        scales, packed = self._parts(encoded, len(out))
        for first, block in blocks_of(out, _BLOCK):
            target = packed[first * _BLOCK // _PER_BYTE :][: -(-block.numel() // _PER_BYTE)].view(torch.int8)
            codes = ROOM.of("levels", (len(target), _PER_BYTE), torch.int8)
            for at in range(_PER_BYTE):  # shifted up and down again, so that the upper of the two bits is the sign
                codes[:, at] = (target << 6 - 2 * at) >> 6
            block.view(-1).copy_(codes.view(-1)[: block.numel()])
            block.add_(_ABOVE).mul_(scales[first : first + len(block), None])

    def _parts(self, encoded: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, float32 [blocks], and packed codes, uint8 [a quarter of n]."""
        num_bytes = len(encoded) - -(-num_elements // _PER_BYTE)
        return encoded[:num_bytes].view(torch.float32), encoded[num_bytes:]


def _levels(block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The codes of float32 [blocks, n], -2 to 1; writes the scales to `scales`, float32 [blocks]."""
    sizes = sizes_of(block, scales).clamp(min=_TINY)
    part = torch.mul(block, sizes.reciprocal()[:, None], out=ROOM.of("part", block.shape))  # squares stay finite
    spread = torch.linalg.vector_norm(part, dim=1).mul_(_APART / block.shape[1] ** 0.5).clamp_(min=_TINY)
    levels = torch.mul(part, spread.reciprocal_()[:, None], out=ROOM.of("work", block.shape))
    levels.floor_().clamp_(-2, 1).add_(_ABOVE)
    torch.div(part.mul_(levels).sum(1), levels.square().sum(1), out=scales)
    scales.mul_(sizes)
    return levels.sub_(_ABOVE)


ENTRY = Q2Codec
