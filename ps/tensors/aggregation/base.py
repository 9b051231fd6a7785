"""The base of all aggregations: the payloads of the open round, and how buffers are averaged.

    fold(payload, weight, rank) ... fold(payload, weight, rank)       as contributions come
    complete(window), for every window; close()                 at the commit

The first payload of a round becomes the result, without a copy. A file in this folder is an aggregation, found by its
`ENTRY`. It decides what happens to a payload after the first (`_add`; here: it is kept until the commit), and how a
window of the result is made (`complete`; here: as a weighted mean). All of it runs on the tensor thread.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

import torch

from ....common.tensors.layout import FlatRun, Kind, View
from ..windows import Window

Buffers = Literal["average", "lowest_rank", "keep"]


class Kept(NamedTuple):
    """A payload that is not in the result yet. `share` is its share of the mean of those up to it. `is_lowest`: no
    payload so far is of a lower rank, so buffers that are not averaged are taken from it."""

    payload: torch.Tensor
    share: float
    is_lowest: bool


class Aggregator:
    """Makes one payload, uint8 [exchange_bytes], of those folded in a round.

    `trim` is policy.trim, for aggregations that read it. `result` is None while nothing is folded; its bytes in a
    window are right once the window is complete. `lowest_rank` is the lowest that was folded.
    """

    sums = False  # gradients are added up, buffers are not

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
        """The contributions that a round needs for the promised robustness."""
        return 1

    def fold(self, payload: torch.Tensor, weight: float, rank: int, may_keep: bool) -> list[torch.Tensor]:
        """Take a contribution; returns payloads that may be reused at once.

        A payload that may be kept is read again at the commit, when its windows pass through the cache anyway.
        """
        self.num_folded += 1
        self._weight += weight
        # Of a rank that contributed twice the newer one counts.
        is_lowest, self.lowest_rank = rank <= self.lowest_rank, min(rank, self.lowest_rank)
        if self.result is None:
            self.result = payload
            return []
        return self._add(Kept(payload, weight / self._weight, is_lowest), may_keep)

    def _add(self, kept: Kept, may_keep: bool) -> list[torch.Tensor]:
        """Take one more payload after the first; returns payloads that may be reused at once."""
        self._kept.append(kept)
        return []

    def complete(self, window: Window) -> None:
        """Make the window's bytes of `result` the result of the round."""
        for kept in self._kept:
            for piece in window.pieces:
                self._blend(piece, kept)

    @property
    def payloads(self) -> list[torch.Tensor]:
        """All payloads of the round, the result first."""
        return [] if self.result is None else [self.result, *(kept.payload for kept in self._kept)]

    def close(self) -> list[torch.Tensor]:
        """End the round; returns payloads that may be reused, the result's first."""
        payloads = self.payloads
        self._reset()
        return payloads

    def _blend(self, piece: FlatRun, kept: Kept) -> None:
        """Add one value to a weighted mean: mean += (x - mean) w / (sum of weights so far).

        One pass, and equal values give exactly themselves. Where no mean is made, the value is of the lowest rank.
        """
        assert self.result is not None
        result, value = self._view(piece, self.result), self._view(piece, kept.payload)
        if self.sums and piece.kind is Kind.PARAMETER:
            result.add_(value)
        elif piece.is_averaged and not (piece.kind is Kind.BUFFER and self._buffers == "lowest_rank"):
            result.lerp_(value, kept.share)
        elif kept.is_lowest:
            result.copy_(value)
