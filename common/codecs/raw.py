"""Unencoded bytes. Senders and receivers do not call this codec: they read and write a raw payload in place."""

from __future__ import annotations

import torch

from ..tensors.layout import Layout
from .base import Codec


class RawCodec(Codec):
    name = "raw"
    is_identity = True

    def encoded_bytes(self, layout: Layout) -> int:
        return layout.parameter_bytes

    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload[: layout.parameter_bytes])

    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        payload[: layout.parameter_bytes].copy_(encoded)


ENTRY = RawCodec
