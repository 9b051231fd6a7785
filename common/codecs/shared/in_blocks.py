"""Base of the codecs with a scale for each block of 256 values.

A piece of n values is encoded as a float32 scale for each block, then a code of `bits` bits for each value. The last
byte is padded with zero bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from .by_tensor import ByTensor, blocks_of

BLOCK = 256  # values; a multiple of the codes in a byte
TINY = torch.finfo(torch.float32).tiny
_SCALE_BYTES = 4


class InBlocks(ByTensor):
    bits: ClassVar[int]  # size of a code

    def size(self, num_elements: int) -> int:
        return -(-num_elements // BLOCK) * _SCALE_BYTES + -(-num_elements * self.bits // 8)

    def parts(
        self, values: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (values, scales, codes) of all whole blocks, then of the shorter last block, if any.

        Shapes: values [blocks, n], scales float32 [blocks], codes uint8 [bytes].
        """
        num_bytes = -(-len(values) // BLOCK) * _SCALE_BYTES
        scales, codes = encoded[:num_bytes].view(torch.float32), encoded[num_bytes:]
        for first, block in blocks_of(values, BLOCK):
            begin, size = first * BLOCK * self.bits // 8, -(-block.numel() * self.bits // 8)
            yield block, scales[first : first + len(block)], codes[begin : begin + size]
