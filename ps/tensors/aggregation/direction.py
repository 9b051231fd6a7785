"""Whether rounds go the same way: the cosine between a round's mean and the mean of the round before."""

from __future__ import annotations

import math

import torch

from ....common.tensors.layout import Kind, View
from ..windows import Window

_MAX_SAMPLED = 1 << 16  # elements of all: right to about half a percent


class Direction:
    """Compares means whose windows come one after another, by an even sample of their elements."""

    def __init__(self, windows: list[Window], view: View) -> None:
        self._view = view
        self._pieces = [[piece for piece in window.pieces if piece.kind is Kind.PARAMETER] for window in windows]
        num_elements = sum(piece.num_elements for pieces in self._pieces for piece in pieces)
        self._stride = -(-num_elements // _MAX_SAMPLED)
        # The newest sample of each window, and of each fragment: tensors that its rounds were without.
        self._before: dict[tuple[int, frozenset[str]], torch.Tensor] = {}
        self._sum, self._count = 0.0, 0
        self._dot = self._square = self._square_before = 0.0

    def see(self, index: int, mean: torch.Tensor, without: frozenset[str] = frozenset()) -> None:
        """A window of a mean, uint8 [exchange_bytes], is complete. It is compared with the same fragment's before."""
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
        """All windows of a round were seen."""
        if length := math.sqrt(self._square * self._square_before):
            self._sum, self._count = self._sum + self._dot / length, self._count + 1
        self._dot = self._square = self._square_before = 0.0

    @property
    def cosine(self) -> float | None:
        """The mean over the rounds; None before the second."""
        return self._sum / self._count if self._count else None
