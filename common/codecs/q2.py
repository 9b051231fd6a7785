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

from .shared.by_tensor import ROOM, ByTensor, blocks_of, sizes_of

_BLOCK = 256
_SCALE_BYTES = 4
_PER_BYTE = 4
_ABOVE = 0.5  # level minus code
_APART = 0.9957  # distance of levels, in standard deviations
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
            for at in range(_PER_BYTE):  # the shift down extends the sign, which is the upper of the two bits
                codes[:, at] = (target << 6 - 2 * at) >> 6
            block.view(-1).copy_(codes.view(-1)[: block.numel()])
            block.add_(_ABOVE).mul_(scales[first : first + len(block), None])

    def _parts(self, encoded: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales, float32 [blocks], and the packed codes, uint8 [n / 4]."""
        num_bytes = len(encoded) - -(-num_elements // _PER_BYTE)
        return encoded[:num_bytes].view(torch.float32), encoded[num_bytes:]


def _levels(block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of float32 [blocks, n], -2 to 1, and write the scales to `scales`, float32 [blocks]."""
    sizes = sizes_of(block, scales).clamp(min=_TINY)
    part = torch.mul(block, sizes.reciprocal()[:, None], out=ROOM.of("part", block.shape))  # squares stay finite
    spread = torch.linalg.vector_norm(part, dim=1).mul_(_APART / block.shape[1] ** 0.5).clamp_(min=_TINY)
    levels = torch.mul(part, spread.reciprocal_()[:, None], out=ROOM.of("work", block.shape))
    levels.floor_().clamp_(-2, 1).add_(_ABOVE)
    torch.div(part.mul_(levels).sum(1), levels.square().sum(1), out=scales)
    scales.mul_(sizes)
    return levels.sub_(_ABOVE)


ENTRY = Q2Codec
