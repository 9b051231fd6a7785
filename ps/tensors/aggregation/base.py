"""What every aggregation shares: the payloads of the round that is open, and how buffers are averaged.

    fold(payload, weight, rank) ... fold(payload, weight, rank)       as contributions come
    complete(window), for every window; close()                 at the commit

The first payload of a round becomes the result, without a copy. A file in this folder is an aggregation,
named by its `ENTRY`; it says what to do with a payload after the first (`_add`: keep it until the commit) and how a
window
of the result is made (`complete`: as a weighted mean). All of it runs on the tensor thread.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

import torch

from ....common.tensors.layout import FlatRun, Kind, View
from ..windows import Window

Buffers = Literal["average", "lowest_rank", "keep"]


class Kept(NamedTuple):
    """A payload that waits to be taken into the result, its share of the mean of those up to it, and whether its rank
    is
    the lowest so far, whose buffers are taken where no mean is made of them."""

    payload: torch.Tensor
    share: float
    is_lowest: bool


class Aggregator:
    """Makes one payload, uint8 [exchange_bytes], of those folded in a round.

    `trim` is policy.trim, for those that read it. `result` is None while nothing is folded; its bytes in a
    window are right once the window is complete. `lowest_rank` is the lowest that was folded.
    """

    sums = False  # gradients are added up, buffers are not

    def __init__(self, windows: list[Window], view: View, buffers: Buffers, trim: int) -> None:
        self.trim = trim
        self._windows = windows
        self._view = view
        self._buffers = buffers
        self._reset()

    def _reset(self) -> None:
        self.result: torch.Tensor | None = None
        self.num_folded = 0
        self.lowest_rank = sys.maxsize
        self._weight = 0.0
        self._kept: list[Kept] = []

    @property
    def fewest(self) -> int:
        """Contributions of a round with fewer of which it withstands less than it says."""
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
        """Take in one more payload after the first; returns payloads that may be reused at once."""
        self._kept.append(kept)
        return []

    def complete(self, window: Window) -> None:
        """Make the window's bytes of `result` what the round comes to."""
        for kept in self._kept:
            for piece in window.pieces:
                self._blend(piece, kept)

    @property
    def payloads(self) -> list[torch.Tensor]:
        """All that are held, the result first."""
        return [] if self.result is None else [self.result, *(kept.payload for kept in self._kept)]

    def close(self) -> list[torch.Tensor]:
        """End the round; returns payloads that may be reused, the result's first."""
        payloads = self.payloads
        self._reset()
        return payloads

    def _blend(self, piece: FlatRun, kept: Kept) -> None:
        """One more value into a weighted mean: mean += (x - mean) w / (sum of weights so far).

        One pass, and equal values give exactly themselves. Where no mean is made, the value is of the lowest rank.
        """
        assert self.result is not None
        view = self._view
        if self.sums and piece.kind is Kind.PARAMETER:
            view(piece, self.result).add_(view(piece, kept.payload))
        elif piece.is_averaged and not (piece.kind is Kind.BUFFER and self._buffers == "lowest_rank"):
            view(piece, self.result).lerp_(view(piece, kept.payload), kept.share)
        elif kept.is_lowest:
            view(piece, self.result).copy_(view(piece, kept.payload))
