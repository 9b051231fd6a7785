"""The bytes as they are. Senders and receivers skip the copy: a raw body is read and written in place."""

from __future__ import annotations

import torch

from ..tensors.layout import Layout
from .base import SelfContained


class RawCodec(SelfContained):
    name = "raw"
    is_identity = goes_in_parts = True

    def encoded_bytes(self, layout: Layout) -> int:
        return layout.parameter_bytes

    def encode(self, layout: Layout, body: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(body[: layout.parameter_bytes])

    def decode(self, layout: Layout, encoded: torch.Tensor, body: torch.Tensor) -> None:
        body[: layout.parameter_bytes].copy_(encoded)


ENTRY = RawCodec
