"""A cache of attention keys and values for several sequences of different lengths.

A model that uses it takes it as `model(tokens, cache=view)`, with tokens (B, T) that follow those in the cache:

    q, k = rotate(q, view.positions), rotate(k, view.positions)      # (B, T)
    k, v = view.append(layer, k, v)                                  # (B, H, T, D) -> (B, H, S, D)
    y = scaled_dot_product_attention(q, k, v, attn_mask=view.mask)   # (B, 1, T, S), True: may look
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """The rows of one forward pass, the tokens that each has, and the number of tokens that each gets."""

    rows: Sequence[int]
    lengths: Sequence[int]
    num_tokens: int


class KvCache:
    """Memory [layers, 2, rows, heads, context, channels], allocated once; a row belongs to one sequence."""

    def __init__(self, shape: tuple[int, int, int], num_rows: int, context: int, dtype: torch.dtype) -> None:
        num_layers, num_heads, num_channels = shape
        self.context = context
        self._memory = torch.zeros(num_layers, 2, num_rows, num_heads, context, num_channels, dtype=dtype)
        self._free = list(range(num_rows))
        self._num_written = [0] * num_rows

    def take(self) -> int:
        """Take and return the lowest free row, so that the rows of a batch are mostly contiguous."""
        return heappop(self._free)

    def give_back(self, row: int) -> None:
        """Free a row."""
        heappush(self._free, row)

    def view(self, rows: Sequence[int], lengths: Sequence[int], num_tokens: int) -> CacheView:
        """Return a view of rows that have `lengths` tokens. Each gets `num_tokens` more."""
        for row, length in zip(rows, lengths, strict=True):
            if length == 0:  # a mask hides old values, but 0 * NaN is NaN
                self._memory[:, :, row, :, : self._num_written[row]] = 0
            self._num_written[row] = length + num_tokens
        return CacheView(self._memory, Rows(rows, lengths, num_tokens))


class CacheView:
    """The rows of one forward pass. `positions` (B, T); `mask` (B, 1, T, S)."""

    def __init__(self, memory: torch.Tensor, request: Rows) -> None:
        rows, lengths, num_tokens = request
        self.rows = request
        self._memory, self._rows = memory, torch.tensor(rows)
        begins = torch.tensor(lengths)
        self.positions = begins.unsqueeze(1) + torch.arange(num_tokens)
        self.length = int(begins.max()) + num_tokens  # S
        self.mask = (torch.arange(self.length) <= self.positions.unsqueeze(-1)).unsqueeze(1)
        # Contiguous rows are read in place; other rows are copied.
        is_range = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._read: slice | torch.Tensor = slice(rows[0], rows[0] + len(rows)) if is_range else self._rows

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values (B, H, T, D) of a layer. Return those of all S tokens, (B, H, S, D) each."""
        found = []
        for memory, new in zip(self._memory[layer], (k, v), strict=True):
            # Indexed by (B, T): the result of the two indices comes first.
            memory[self._rows.unsqueeze(1), :, self.positions] = new.transpose(1, 2)
            found.append(memory[self._read, :, : self.length])
        return found[0], found[1]
