"""Measures the cosine between a round's mean and the previous round's mean."""

from __future__ import annotations

import math

import torch

from ....common.tensors.layout import Kind, View
from ..flat_optimizer import Window

_MAX_SAMPLED = 1 << 16  # sampled elements of the model, for an error of about half a percent


class Direction:
    """Compares means window by window, by an evenly spaced sample of their elements."""

    def __init__(self, windows: list[Window], view: View) -> None:
        self._view = view
        self._pieces = [[piece for piece in window.pieces if piece.kind is Kind.PARAMETER] for window in windows]
        num_elements = sum(piece.num_elements for pieces in self._pieces for piece in pieces)
        self._stride = -(-num_elements // _MAX_SAMPLED)
        # The newest sample by window and by the tensors that the round was without, which identify a fragment.
        self._before: dict[tuple[int, frozenset[str]], torch.Tensor] = {}
        self._sum, self._count = 0.0, 0
        self._dot = self._square = self._square_before = 0.0

    def see(self, index: int, mean: torch.Tensor, without: frozenset[str] = frozenset()) -> None:
        """Compare a complete window of a mean, uint8 [exchange_bytes], with the same fragment's previous one."""
        pieces = [self._view(piece, mean)[:: self._stride].double() for piece in self._pieces[index]]
        if not pieces:
            return
        now = torch.cat(pieces)
        if (before := self._before.get((index, without))) is not None:
            self._dot += float(now @ before)
            self._square += float(now @ now)
            self._square_before += float(before @ before)
        self._before[index, without] = now

    def close(self) -> None:
        """Finish a round after all its windows."""
        if length := math.sqrt(self._square * self._square_before):
            self._sum, self._count = self._sum + self._dot / length, self._count + 1
        self._dot = self._square = self._square_before = 0.0

    @property
    def cosine(self) -> float | None:
        """The mean cosine over all rounds, or None before the second round."""
        return self._sum / self._count if self._count else None
