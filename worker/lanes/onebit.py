"""Contributions of 1-bit Adam: gradients until the server's second moment stands still, then momentum in signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.codecs.base import Codec
from ...common.codecs.bf16 import Bf16Codec
from ...common.codecs.shared.by_tensor import Piece
from ...common.tensors.layout import Layout, new_body
from ...common.tensors.optimizers import Hyperparameters
from .encoding import Encoding


class OneBit(Encoding):
    """Error feedback as everywhere, of what is sent: of bf16 first, of signs then."""

    def __init__(self, codec: Codec, layout: Layout, num_exchanged: int) -> None:
        self._warm, self._signs = Bf16Codec(), codec
        self._warm.has_feedback = True  # m is added up on the way
        super().__init__(self._warm, layout, num_exchanged, codec.momentum)
        self._warmup_steps = 0
        self._told: tuple[Sequence[Hyperparameters], list[Hyperparameters]] | None = None

    def ready(self, version: int) -> None:
        codec = self._signs if version >= self._warmup_steps else self._warm
        if codec is not self.codec:
            self.use(codec)

    def of_optimizer(self, groups: Sequence[Hyperparameters]) -> None:
        self._momentum, self._warmup_steps = groups[0]["betas"][0], int(groups[0]["warmup_steps"])

    def told(self, groups: list[Hyperparameters]) -> list[Hyperparameters]:
        """What is sent in signs is m already."""
        if self.codec is self._warm or not groups:
            return groups
        if self._told is None or self._told[0] is not groups:
            changed: list[dict[str, Any]] = [
                {**group, "betas": [0.0, group["betas"][1]]} if "betas" in group else group for group in groups
            ]
            self._told = groups, changed
        return self._told[1]

    def _speed_up(self, piece: Piece, values: torch.Tensor) -> None:
        """m; `values` become it once it is what is sent."""
        if self._next_speed is None:
            self._next_speed = new_body(self._layout.exchange_bytes)
        speed = torch.mul(values, 1 - self._momentum, out=piece.of_body(self._next_speed))
        if self._speed is not None:
            speed.add_(piece.of_body(self._speed), alpha=self._momentum)
        if self.codec is self._signs:
            values.copy_(speed)


def encoding_of(codec: Codec, layout: Layout, num_exchanged: int, momentum: float = 0.0) -> Encoding:
    """What a codec's contributions go through."""
    if codec.optimizer is not None:
        return OneBit(codec, layout, num_exchanged)
    return Encoding(codec, layout, num_exchanged, momentum)
