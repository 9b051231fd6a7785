"""The signs of a tensor and the mean of its sizes: 31.9 times fewer bytes.

EF-SGD (Karimireddy et al. 2019, arXiv:1901.09847). Of a tensor of n values: s = sum(abs c) / n, float32; then a bit for
each value, 1 for a minus, eight in a byte, the first one lowest, the last byte filled with 0. Decoded is s or -s.
"""

from __future__ import annotations

import numpy as np
import torch

from .shared.by_tensor import ByTensor

_SCALE_BYTES = 4
_AT_ONCE = 1 << 17


class SignCodec(ByTensor):
    name = "sign"
    suits_adaptive = suits_momentum = False
    piece = 1 << 62  # one scale for a tensor

    def size(self, num_elements: int) -> int:
        return _SCALE_BYTES + -(-num_elements // 8)

    def scale(self, values: torch.Tensor) -> float:
        """Of float32 [n]."""
        sums = [float(part.abs().sum()) for part in values.split(_AT_ONCE)]
        return sum(sums) / len(values)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out[:_SCALE_BYTES].view(torch.float32).fill_(self.scale(values))
        bits = np.packbits(np.less(values.numpy(), 0), bitorder="little")
        out[_SCALE_BYTES:].copy_(torch.from_numpy(bits))

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        bits = np.unpackbits(encoded[_SCALE_BYTES:].numpy(), count=len(out), bitorder="little")
        out.copy_(torch.from_numpy(bits)).mul_(-2).add_(1).mul_(encoded[:_SCALE_BYTES].view(torch.float32))


ENTRY = SignCodec
