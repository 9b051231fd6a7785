"""The base class of all aggregations. It keeps the payloads of the open round, and averages buffers.

    fold(payload, weight, rank) ... fold(payload, weight, rank)       as contributions arrive
    complete(window), for every window; close()                       at the commit

The first payload of a round becomes the result, without a copy. Each file in this folder is an aggregation, found by
its `ENTRY`. A subclass may override `_add`, which handles a later payload (here it is kept until the commit), and
`complete`, which makes a window of the result (here a weighted mean). All methods run on the tensor thread.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

import torch

from ....common.tensors.layout import FlatRun, Kind, View
from ..windows import Window

Buffers = Literal["average", "lowest_rank", "keep"]


class Kept(NamedTuple):
    """A payload that is not in the result yet.

    `share` is its weight divided by the sum of weights up to it. `is_lowest`: no earlier payload is from a lower rank,
    so buffers that are not averaged are copied from this one.
    """

    payload: torch.Tensor
    share: float
    is_lowest: bool


class Aggregator:
    """Combines the payloads of a round into one, uint8 [exchange_bytes].

    `trim` is policy.trim, for aggregations that read it. `result` is None until a payload is folded. A window of it is
    valid once `complete` was called for the window. `lowest_rank` is the lowest folded rank.
    """

    sums = False  # True: gradients are summed; buffers are still averaged

    def __init__(self, windows: list[Window], view: View, buffers: Buffers, trim: int) -> None:
        self.trim = trim
        self._windows, self._view, self._buffers = windows, view, buffers
        self._reset()

    def _reset(self) -> None:
        self.result: torch.Tensor | None = None
        self.num_folded = 0
        self.lowest_rank = sys.maxsize
        self._weight = 0.0
        self._kept: list[Kept] = []

    @property
    def fewest(self) -> int:
        """The fewest contributions of a round with which the aggregation is robust."""
        return 1

    def fold(self, payload: torch.Tensor, weight: float, rank: int, may_keep: bool) -> list[torch.Tensor]:
        """Add a contribution, and return the payloads that may be reused at once.

        With `may_keep`, the payload may be read again at the commit, when its windows pass through the cache anyway.
        """
        self.num_folded += 1
        self._weight += weight
        # If a rank contributed twice, its newer contribution counts.
        is_lowest, self.lowest_rank = rank <= self.lowest_rank, min(rank, self.lowest_rank)
        if self.result is None:
            self.result = payload
            return []
        return self._add(Kept(payload, weight / self._weight, is_lowest), may_keep)

    def _add(self, kept: Kept, may_keep: bool) -> list[torch.Tensor]:
        """Add a payload after the first, and return the payloads that may be reused at once."""
        self._kept.append(kept)
        return []

    def complete(self, window: Window) -> None:
        """Compute the result of the round in the window's bytes of `result`."""
        for kept in self._kept:
            for piece in window.pieces:
                self._blend(piece, kept)

    @property
    def payloads(self) -> list[torch.Tensor]:
        """All payloads of the round, the result first."""
        return [] if self.result is None else [self.result, *(kept.payload for kept in self._kept)]

    def close(self) -> list[torch.Tensor]:
        """End the round, and return the payloads that may be reused, the result's first."""
        payloads = self.payloads
        self._reset()
        return payloads

    def _blend(self, piece: FlatRun, kept: Kept) -> None:
        """Add a payload's values to the weighted mean: mean += (x - mean) w / (sum of weights so far).

        This takes one pass, and the mean of equal values is exactly their value. Values that are not averaged come from
        the lowest rank.
        """
        assert self.result is not None
        result, value = self._view(piece, self.result), self._view(piece, kept.payload)
        if self.sums and piece.kind is Kind.PARAMETER:
            result.add_(value)
        elif piece.is_averaged and not (piece.kind is Kind.BUFFER and self._buffers == "lowest_rank"):
            result.lerp_(value, kept.share)
        elif kept.is_lowest:
            result.copy_(value)
