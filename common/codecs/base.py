"""What a codec is. Codecs are lossless or not, but always stateless and of fixed size per layout."""

from __future__ import annotations

from typing import Protocol

import torch

from ..tensors.layout import Layout


class Codec(Protocol):
    """Encodes the parameters' part of a body, [0, layout.parameter_bytes)."""

    name: str

    def encoded_bytes(self, layout: Layout) -> int:
        """Size of the encoded part for every body of this layout."""

    def encode(self, layout: Layout, body: torch.Tensor, out: torch.Tensor) -> None:
        """`body` uint8 [>= parameter_bytes] -> `out` uint8 [encoded_bytes]."""

    def decode(self, layout: Layout, encoded: torch.Tensor, body: torch.Tensor) -> None:
        """`encoded` uint8 [encoded_bytes] -> `body` uint8 [>= parameter_bytes]."""
