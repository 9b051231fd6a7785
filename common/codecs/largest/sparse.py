"""The 64 largest of every 4,096 values in 2 bits each: 146 times fewer bytes, for differences of many steps.

SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706; Templar). Of a tensor, in chunks of 4,096 values, the last one shorter:
of each chunk the 64 values that are largest in size (of a shorter one of n, ceil(n / 64)) are kept, K in all. With m
and d, the mean and standard deviation of these K, each gets the level clamp(round((v - m) / (1.5 d) + 2), 0, 3) and is
decoded as the mean of its level. What is sent: the four means, float32; K times its place in its chunk, 12 bits,
ascending within a chunk, two in three bytes, the first one lowest; K levels, 2 bits, four in a byte, the first one
lowest. What fills the last bytes is 0. What was left out fades: before it is added it is multiplied by 0.95.
"""

from __future__ import annotations

import torch

from ..shared.by_tensor import ByTensor, largest, scatter

_LEVELS = 4
_TABLE_BYTES = 4 * _LEVELS
_AT_ONCE = 1 << 17  # values
_WORD_BITS = 24  # so many bits of places fill three bytes


class SparseCodec(ByTensor):
    name = "sparse"
    suits_adaptive = False
    suits_outer_momentum = False
    decay = 0.95
    least = 4096
    chunk = 4096
    kept = 64  # of a chunk
    piece = 1 << 62  # the four means are of a whole tensor

    def size(self, num_elements: int) -> int:
        num_kept = self._num_kept(num_elements)
        return _TABLE_BYTES + self._place_bytes(num_kept) + -(-num_kept // 4)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        parts = [part for chunks in self._chunks_of(values) for part in chunks.split(_AT_ONCE // self.chunk)]
        found = [largest(part, self._kept_of(part.shape[1])) for part in parts]
        kept = torch.cat([part.gather(1, places).view(-1) for part, places in zip(parts, found, strict=True)])
        places = torch.cat([places.view(-1) for places in found])
        table, levels = _levels_of(kept)
        _, place_bytes, level_bytes = self._parts(out, len(kept))
        out[:_TABLE_BYTES].view(torch.float32).copy_(table)
        _pack(places, self._bits, _WORD_BITS // self._bits, place_bytes)
        _pack(levels, 2, 4, level_bytes)

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        num_kept = self._num_kept(len(out))
        table, place_bytes, level_bytes = self._parts(encoded, num_kept)
        places = _unpack(place_bytes, self._bits, _WORD_BITS // self._bits, num_kept)
        levels = _unpack(level_bytes, 2, 4, num_kept)
        kept, at = table.view(torch.float32)[levels], 0
        out.zero_()
        for chunks in self._chunks_of(out):
            num = len(chunks) * self._kept_of(chunks.shape[1])
            scatter(chunks, places[at : at + num].view(len(chunks), -1), kept[at : at + num].view(len(chunks), -1))
            at += num

    def _parts(self, encoded: torch.Tensor, num_kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bytes of means, of places and of levels."""
        end = _TABLE_BYTES + self._place_bytes(num_kept)
        return encoded[:_TABLE_BYTES], encoded[_TABLE_BYTES:end], encoded[end:]

    def _kept_of(self, num_elements: int) -> int:
        return -(-num_elements * self.kept // self.chunk)

    def _num_kept(self, num_elements: int) -> int:
        return num_elements // self.chunk * self.kept + self._kept_of(num_elements % self.chunk)

    def _place_bytes(self, num_kept: int) -> int:
        return -(-num_kept * self._bits // _WORD_BITS) * _WORD_BITS // 8

    @property
    def _bits(self) -> int:
        """Of a place in a chunk."""
        return (self.chunk - 1).bit_length()

    def _chunks_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """[n] as [chunks, of a chunk] and what is left over, [1, fewer]."""
        full = len(values) // self.chunk * self.chunk
        both = values[:full].view(-1, self.chunk), values[full:].view(1, -1)
        return [chunks for chunks in both if chunks.numel()]


def _levels_of(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of the four levels, and each value's level, int64."""
    spread = float(kept.std())
    if spread != spread or spread == torch.inf:
        return torch.full((_LEVELS,), torch.nan), torch.zeros(len(kept), dtype=torch.int64)
    width = max(1.5 * spread, torch.finfo(torch.float32).tiny)  # all may be the same
    levels = ((kept - kept.mean()) / width + _LEVELS / 2).round_().clamp_(0, _LEVELS - 1).long()
    sums = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, levels, kept.double())
    return (sums / levels.bincount(minlength=_LEVELS).clamp(min=1)).float(), levels


def _pack(numbers: torch.Tensor, num_bits: int, at_once: int, out: torch.Tensor) -> None:
    """int64 [n] of so many bits each to bytes, the first of `at_once` lowest in as many as hold them."""
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % at_once)).view(-1, at_once)
    words = (padded << torch.arange(0, num_bits * at_once, num_bits)).sum(1).to(torch.int32)
    out.view(len(words), -1).copy_(words.view(torch.uint8).view(-1, 4)[:, : num_bits * at_once // 8])


def _unpack(packed: torch.Tensor, num_bits: int, at_once: int, count: int) -> torch.Tensor:
    """Back, int64 [count]."""
    num_bytes = num_bits * at_once // 8
    words = torch.zeros(len(packed) // num_bytes, 4, dtype=torch.uint8)
    words[:, :num_bytes] = packed.view(-1, num_bytes)
    shifts = torch.arange(0, num_bits * at_once, num_bits)
    return (words.view(torch.int32).long() >> shifts & (1 << num_bits) - 1).view(-1)[:count]


ENTRY = SparseCodec
