"""Signs of the momentum after Adam's warm-up: 31.9 times fewer bytes.

1-bit Adam (Tang et al. 2021, arXiv:2102.02888) with the server's `OneBitAdam`. While the optimizer's second moment
warms up, a worker sends gradients as bf16 and updates its own momentum: m <- b1 m + (1 - b1) g. After the warm-up it
sends m, with error feedback, and sets b1 to 0. The server uses the mean of these as its momentum, because the mean of
all workers' momentum is the momentum of the mean gradient. The paper also encodes the server's replies as signs with
error feedback. Here `worker.reply_codec` encodes the replies.

The payload of a tensor c of n values is s = norm2(c) / sqrt(n), float32 (as in DeepSpeed's 1-bit Adam), then one bit
for each value. The bit is 1 for a negative value. A byte has eight bits, lowest first, and the last byte is padded with
0. A value is decoded as s or -s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import UsageError
from ..tensors.layout import Layout, new_payload
from ..tensors.optimizers import Hyperparameters
from .base import Codec
from .bf16 import Bf16Codec
from .shared.by_tensor import ByTensor, Piece, Preparation

_SCALE_BYTES = 4


class OneBitAdamCodec(ByTensor):
    name = "onebit_adam"
    piece = 1 << 62  # one scale for a tensor

    def size(self, num_elements: int) -> int:
        return _SCALE_BYTES + -(-num_elements // 8)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scale = float(torch.linalg.vector_norm(values)) / math.sqrt(len(values))
        out[:_SCALE_BYTES].view(torch.float32).fill_(scale)
        bits = np.packbits(np.less(values.numpy(), 0), bitorder="little")
        out[_SCALE_BYTES:].copy_(torch.from_numpy(bits))

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        bits = np.unpackbits(encoded[_SCALE_BYTES:].numpy(), count=len(out), bitorder="little")
        out.copy_(torch.from_numpy(bits)).mul_(-2).add_(1).mul_(encoded[:_SCALE_BYTES].view(torch.float32))

    def preparation(self, layout: Layout) -> Preparation:
        return _Momentum(self, layout)


class _Momentum:
    """One worker's momentum, which it sends instead of its gradients after the warm-up."""

    def __init__(self, signs: Codec, layout: Layout) -> None:
        self._warm, self._signs = Bf16Codec(), signs
        self._beta, self._warmup_steps = 0.9, 1  # until the optimizer is known
        self._is_warm = True  # still warming up: the newest contribution is a gradient
        self._momentum = new_payload(layout.exchange_bytes)
        self._next = new_payload(layout.exchange_bytes)  # the momentum after the newest contribution, if it counts
        self._sent: tuple[tuple[Hyperparameters, ...], tuple[Hyperparameters, ...]] | None = None

    def begin(self, groups: Sequence[Hyperparameters]) -> None:
        """Raises UsageError if groups have different betas or warm-ups: there is one momentum for all."""
        if len({(*group["betas"], group["warmup_steps"]) for group in groups}) > 1:
            message = "codec onebit_adam with parameter groups of different betas or warmup_steps"
            raise UsageError(message, fix="the same for all groups; or another codec, e.g. --set worker.codec=int8")
        self._beta, self._warmup_steps = groups[0]["betas"][0], int(groups[0]["warmup_steps"])

    def codec(self, version: int) -> Codec:
        self._is_warm = version < self._warmup_steps
        return self._warm if self._is_warm else self._signs

    def apply(self, piece: Piece, values: torch.Tensor) -> None:
        momentum = torch.mul(values, 1 - self._beta, out=piece.of_payload(self._next))
        momentum.add_(piece.of_payload(self._momentum), alpha=self._beta)
        if not self._is_warm:
            values.copy_(momentum)

    def rest(self, piece: Piece) -> None:
        piece.of_payload(self._next).copy_(piece.of_payload(self._momentum))

    def commit(self) -> None:
        self._momentum, self._next = self._next, self._momentum

    def reset(self) -> None:
        self._momentum.zero_()

    def hyperparameters(self, groups: tuple[Hyperparameters, ...]) -> tuple[Hyperparameters, ...]:
        """Return the groups with b1 = 0 after the warm-up, since the payload is the momentum. The tuple is cached."""
        if self._is_warm or not groups:
            return groups
        if self._sent is None or self._sent[0] is not groups:
            changed = ({**group, "betas": [0.0, group["betas"][1]]} if "betas" in group else group for group in groups)
            self._sent = groups, tuple(changed)
        return self._sent[1]


ENTRY = OneBitAdamCodec
