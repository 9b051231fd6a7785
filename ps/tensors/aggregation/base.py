"""The base class of all aggregations. It keeps the payloads of the open round, and averages buffers.

    fold(payload, weight, rank) ... fold(payload, weight, rank)       as contributions arrive
    complete(window), for every window; close()                       at the commit

The first payload of a round becomes the result, without a copy. A payload in a worker's memory is only read, because
the script may keep it as a gradient: then the result has memory of its own. Each file in this folder is an aggregation,
found by its `ENTRY`. A subclass may override `_add`, which handles a later payload (here it is kept until the commit),
and `complete`, which makes a window of the result (here a weighted mean). All methods run on the tensor thread.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Literal, NamedTuple

import torch

from ....common.tensors.layout import FlatRun, Kind, View
from ..flat_optimizer import Window

Buffers = Literal["average", "lowest_rank", "keep"]


class Kept(NamedTuple):
    """A payload that is not in the result yet.

    `share` is its weight divided by the sum of weights up to it. `is_lowest`: no earlier payload is from a lower rank,
    so buffers that are not averaged are copied from this one.
    """

    payload: torch.Tensor
    share: float
    is_lowest: bool


_payload = attrgetter("payload")


class Aggregator:
    """Combines the payloads of a round into one, uint8 [exchange_bytes].

    `trim` is policy.trim, for aggregations that read it. `result` is None until a payload is folded. A window of it is
    valid once `complete` was called for the window. `lowest_rank` is the lowest folded rank.
    """

    sums = False  # True: gradients are summed; buffers are still averaged

    def __init__(self, windows: list[Window], view: View, buffers: Buffers, trim: int) -> None:
        self.trim = trim
        self._windows, self._view, self._buffers = windows, view, buffers
        self._spare: torch.Tensor | None = None  # memory for results
        self._reset()

    def _reset(self) -> None:
        self.result: torch.Tensor | None = None
        self._first: torch.Tensor | None = None  # the payload that the kept ones are added to
        self._is_read_only = False  # nothing may be written to `_first`
        self.num_folded = 0
        self.lowest_rank = sys.maxsize
        self._weight = 0.0
        self._kept: list[Kept] = []

    @property
    def fewest(self) -> int:
        """The fewest contributions of a round with which the aggregation is robust."""
        return 1

    def fold(
        self, payload: torch.Tensor, weight: float, rank: int, may_keep: bool, is_read_only: bool = False
    ) -> list[torch.Tensor]:
        """Add a contribution, and return the payloads that may be reused at once.

        With `may_keep`, the payload may be read again at the commit, when its windows pass through the cache anyway.
        Nothing is written to a payload that `is_read_only`.
        """
        self.num_folded += 1
        self._weight += weight
        # If a rank contributed twice, its newer contribution counts.
        is_lowest, self.lowest_rank = rank <= self.lowest_rank, min(rank, self.lowest_rank)
        if self.result is None:
            self.result = self._first = payload
            self._is_read_only = is_read_only
            return []
        if self._is_read_only and self.result is self._first:
            self.result = self._memory_for_result()
        return self._add(Kept(payload, weight / self._weight, is_lowest), may_keep)

    def _add(self, kept: Kept, may_keep: bool) -> list[torch.Tensor]:
        """Add a payload after the first, and return the payloads that may be reused at once."""
        self._kept.append(kept)
        return []

    def complete(self, window: Window) -> None:
        """Compute the result of the round in the window's bytes of `result`."""
        for piece in window.pieces if self._kept else ():
            self._blend(piece)

    def writable(self, window: Window) -> torch.Tensor:
        """The completed result, which may be changed in the bytes of this window."""
        assert self.result is not None
        if not self._is_read_only or self.result is not self._first:
            return self.result
        memory = self._memory_for_result()
        memory[window.start : window.end].copy_(self.result[window.start : window.end])
        return memory

    def _memory_for_result(self) -> torch.Tensor:
        assert self._first is not None
        if self._spare is None:
            self._spare = torch.empty_like(self._first)
        return self._spare

    @property
    def payloads(self) -> list[torch.Tensor]:
        """All payloads of the round, in the order of their folds."""
        return [] if self._first is None else [self._first, *map(_payload, self._kept)]

    def close(self) -> list[torch.Tensor]:
        """End the round, and return the payloads that may be reused, the result's first."""
        payloads = self.payloads
        self._reset()
        return payloads

    def _blend(self, piece: FlatRun) -> None:
        """Add the kept payloads' values to the weighted mean: mean += (x - mean) w / (sum of weights so far).

        This takes one pass, and the mean of equal values is exactly their value. Values that are not averaged come from
        the lowest rank.
        """
        assert self.result is not None and self._first is not None
        mean = self._view(piece, self._first)
        result = mean if self.result is self._first else self._view(piece, self.result)
        for kept in self._kept:
            value = self._view(piece, kept.payload)
            if self.sums and piece.kind is Kind.PARAMETER:
                mean = torch.add(mean, value, out=result)
            elif piece.is_averaged and not (piece.kind is Kind.BUFFER and self._buffers == "lowest_rank"):
                mean = torch.lerp(mean, value, kept.share, out=result)
            elif kept.is_lowest:
                mean = value
        if mean is not result:
            result.copy_(mean)
