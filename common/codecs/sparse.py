"""The 7 largest of every 64 values in 8 bits each: 36.6 times fewer bytes, for differences of many local steps.

This follows SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706; Templar), which keeps 64 of 4,096 values. That was too few
in our measurements (docs/claims.md, N8). A tensor is cut into chunks of 64 values, the last one shorter. The codec
keeps the 7 largest absolute values of each chunk (ceil(7 n / 64) of a shorter chunk), K in all. With m and d, the mean
and standard deviation of these K values, a value v gets the level clamp(round((v - m) / (1.5 d) + 2), 0, 3). It is
decoded as the mean of its level.

The payload has three parts. First the four means, float32. Then the positions of the K values in their chunks, 6 bits
each, ascending within a chunk, four in three bytes. Then K levels, 2 bits each, four in a byte. Lower bits come first,
and the last bytes are padded with 0. The residual is multiplied by 0.95 before it is added to the next difference.
"""

from __future__ import annotations

import torch

from .shared.by_tensor import ByTensor, blocks_of, largest, scatter

_CHUNK = 64
_KEPT = 7  # values of a whole chunk
_LEVELS = 4
_TABLE_BYTES = 4 * _LEVELS
_PLACE_BITS, _LEVEL_BITS = 6, 2
_AT_ONCE = 1 << 17  # values
_PACKED = 4  # places in three bytes, levels in one


class SparseCodec(ByTensor):
    name = "sparse"
    suits_outer_momentum = False
    decay = 0.95
    least = 4096
    piece = 1 << 62  # a tensor is one piece, because the four means are over all of it

    def size(self, num_elements: int) -> int:
        num_packed = -(-_num_kept(num_elements) // _PACKED)
        return _TABLE_BYTES + (_PLACE_BITS + _LEVEL_BITS) * num_packed * _PACKED // 8

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        parts = [part for _, chunks in blocks_of(values, _CHUNK) for part in chunks.split(_AT_ONCE // _CHUNK)]
        found = [largest(part, _kept_of(part.shape[1])) for part in parts]
        kept = torch.cat([part.gather(1, places).view(-1) for part, places in zip(parts, found, strict=True)])
        table, levels = _levels_of(kept)
        out_table, out_places, out_levels = _parts(out, len(kept))
        out_table.copy_(table)
        _pack(torch.cat([places.view(-1) for places in found]), _PLACE_BITS, out_places)
        _pack(levels, _LEVEL_BITS, out_levels)

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        num_kept = _num_kept(len(out))
        table, packed_places, packed_levels = _parts(encoded, num_kept)
        places = _unpack(packed_places, _PLACE_BITS, num_kept)
        kept, at = table[_unpack(packed_levels, _LEVEL_BITS, num_kept)], 0
        out.zero_()
        for _, chunks in blocks_of(out, _CHUNK):
            num = len(chunks) * _kept_of(chunks.shape[1])
            scatter(chunks, places[at : at + num].view(len(chunks), -1), kept[at : at + num].view(len(chunks), -1))
            at += num


def _parts(encoded: torch.Tensor, num_kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the means, float32 [levels], and the bytes of positions and of levels."""
    end = _TABLE_BYTES + _PLACE_BITS * _PACKED // 8 * -(-num_kept // _PACKED)
    return encoded[:_TABLE_BYTES].view(torch.float32), encoded[_TABLE_BYTES:end], encoded[end:]


def _kept_of(num_elements: int) -> int:
    return -(-num_elements * _KEPT // _CHUNK)


def _num_kept(num_elements: int) -> int:
    return num_elements // _CHUNK * _KEPT + _kept_of(num_elements % _CHUNK)


def _levels_of(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of the four levels, and each value's level, int64."""
    spread = float(kept.std())
    if spread != spread or spread == torch.inf:
        return torch.full((_LEVELS,), torch.nan, device="cpu"), torch.zeros(len(kept), dtype=torch.int64, device="cpu")
    width = max(1.5 * spread, torch.finfo(torch.float32).tiny)  # `spread` is 0 if all values are equal
    levels = ((kept - kept.mean()) / width + _LEVELS / 2).round_().clamp_(0, _LEVELS - 1).long()
    sums = torch.zeros(_LEVELS, dtype=torch.float64, device="cpu").index_add_(0, levels, kept.double())
    return (sums / levels.bincount(minlength=_LEVELS).clamp(min=1)).float(), levels


def _pack(numbers: torch.Tensor, num_bits: int, out: torch.Tensor) -> None:
    """Pack numbers of `num_bits`, int64 [n], into bytes: four numbers at a time, lowest bits first."""
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % _PACKED)).view(-1, _PACKED)
    words = (padded << torch.arange(0, num_bits * _PACKED, num_bits, device="cpu")).sum(1).to(torch.int32)
    out.view(len(words), -1).copy_(words.view(torch.uint8).view(-1, 4)[:, : num_bits * _PACKED // 8])


def _unpack(packed: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Return the numbers that `_pack` packed, int64 [count]."""
    num_bytes = num_bits * _PACKED // 8
    words = torch.zeros(len(packed) // num_bytes, 4, dtype=torch.uint8, device="cpu")
    words[:, :num_bytes] = packed.view(-1, num_bytes)
    shifts = torch.arange(0, num_bits * _PACKED, num_bits, device="cpu")
    return (words.view(torch.int32).long() >> shifts & (1 << num_bits) - 1).view(-1)[:count]


ENTRY = SparseCodec
