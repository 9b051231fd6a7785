"""4 bits for each value, a sign and an exponent, and a scale for 256 values: 7.76 times fewer bytes.

Meant for gradients and differences, for which the magnitude matters more than the last digits; never for weights. The
format is E3M0, as in Streaming DiLoCo (arXiv:2501.18512). A piece of n values has the scales of its blocks of 256,
a = max|c|, float32, then a code for each value. A byte has two codes, the first in the low four bits. A code is 8 for a
negative value, plus a level L. Level 0 is zero, and levels 1..7 are 2^(L-7) a. L is log2(|c| / a) rounded to nearest,
plus 7. Values below 2^-6.5 a are zero.
"""

from __future__ import annotations

import torch

from .shared.by_tensor import ROOM, TINY, InBlocks, sizes_of

_MANTISSA_BITS = 23
# Added to the bits of a float32, this carries into the exponent from sqrt(2) on, where log2 rounds up.
_ROUND = 0x3F800000 - 0x3F3504F3
_BIAS = 127 - 7  # the exponent of 2^(L-7) is L more


class Q4Codec(InBlocks):
    name = "q4"
    bits = 4

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        for block, scale, codes in self.parts(values, out):
            steps = sizes_of(block, scale).clamp(min=TINY).reciprocal_()[:, None]
            work = torch.mul(block, steps, out=ROOM.of("work", block.shape)).view(torch.int32)
            work.add_(_ROUND).bitwise_right_shift_(_MANTISSA_BITS)
            wide = ROOM.of("wide", block.shape, torch.int16).copy_(work)  # the exponent, minus 256 for a negative value
            minus = torch.bitwise_right_shift(wide, 8, out=ROOM.of("minus", block.shape, torch.int16))
            code = ROOM.of("code", block.shape, torch.uint8).copy_(wide)
            code.clamp_(_BIAS, _BIAS + 7).sub_(_BIAS)
            code.bitwise_or_(ROOM.of("minus byte", block.shape, torch.uint8).copy_(minus).bitwise_and_(8))
            _pack(code.view(-1), codes)

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        for block, scale, codes in self.parts(out, encoded):
            code = _unpack(codes, block.numel())
            wide = ROOM.of("wide", code.shape, torch.int16).copy_(code)
            # The bits of a bfloat16: the sign, and L as the exponent. That is 2^(L-127), or zero for L = 0.
            bits = torch.bitwise_and(wide, 8, out=ROOM.of("bits", code.shape, torch.int16)).bitwise_left_shift_(12)
            bits.bitwise_or_(wide.bitwise_and_(7).bitwise_left_shift_(7))
            block.view(-1).copy_(bits.view(torch.bfloat16))
            block.mul_(2.0**_BIAS).mul_(scale[:, None])


def _pack(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Pack codes of four bits, uint8 [n], into `out`, uint8 [n / 2]."""
    if len(codes) % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(torch.int16)  # the second code is in the high byte
    both = torch.bitwise_right_shift(pairs, 4, out=ROOM.of("both", pairs.shape, torch.int16)).bitwise_or_(pairs)
    out.copy_(both)


def _unpack(packed: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return the codes that `_pack` packed, uint8 [n]."""
    both = ROOM.of("both", packed.shape, torch.int16).copy_(packed)
    high = torch.bitwise_left_shift(both, 4, out=ROOM.of("high", packed.shape, torch.int16))
    return both.bitwise_or_(high).bitwise_and_(0x0F0F).view(torch.uint8)[:num_elements]


ENTRY = Q4Codec
