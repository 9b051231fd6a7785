"""Base of the codecs that encode each tensor separately: which tensors they encode, and the offset of each.

A tensor of one dimension (a bias, the scale of a norm) or a small tensor is few of the bytes and matters for the
result, so it is sent as bf16. Every other tensor is cut into pieces of `piece` elements, in C order, the last one
shorter. Each piece is encoded separately, from float32. Tensors are in the order of the payload, each at a multiple of
8 bytes. A piece fits into a core's cache, so all work on it costs one pass over main memory.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from ...tensors.layout import DTYPES, Kind, Layout, TensorSpec
from ...tensors.optimizers import Hyperparameters
from ..base import Codec, Encoder

_ALIGNMENT_BYTES = 8  # allows views of any dtype
_HALF_BYTES = 2
_MAX_VIEWS = 256  # cached views: making a view takes as long as work on 10 KiB


class Piece(NamedTuple):
    """Elements of `dtype` that are encoded together: bytes [offset, offset_end) of a payload, [start, end) encoded."""

    dtype: torch.dtype
    offset: int
    offset_end: int
    start: int
    end: int
    is_encoded: bool  # False: sent as bf16, or unchanged if its dtype has at most 2 bytes
    rows: int  # rows of the whole tensor
    name: str = ""  # of the tensor

    def of_payload(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the piece of `payload`, uint8 [>= offset_end], as [n] of `dtype`. It shares memory."""
        return payload[self.offset : self.offset_end].view(self.dtype)


class ByTensor(Codec):
    """A codec that works on pieces. Subclasses define the encoding of a piece."""

    has_feedback = True
    takes_weights = False
    largest = torch.finfo(torch.float32).max
    fallback_dtype = torch.bfloat16  # for tensors that are not encoded
    aligns = True  # aligns every tensor; False: only the first tensor of a dtype
    least: ClassVar[float] = 1024  # elements: smaller tensors are not encoded
    piece: ClassVar[int] = 1 << 17  # elements; 512 KiB of float32
    without: frozenset[str] = frozenset()  # tensors that are not sent (`only_rest`) and are decoded as zeros

    def size(self, num_elements: int) -> int:
        """Return the bytes of an encoded piece."""
        raise NotImplementedError

    def size_of(self, num_elements: int, rows: int) -> int:
        """Return the bytes of an encoded piece of a tensor with `rows` rows."""
        return self.size(num_elements)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode float32 [n] into uint8 [size(n)]. A piece with NaN or Inf must decode to values with NaN or Inf."""
        raise NotImplementedError

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode uint8 [size(n)] into float32 [n]. It may raise any exception for bytes that no encoder makes."""
        raise NotImplementedError

    def encodes(self, spec: TensorSpec) -> bool:
        """Whether pieces of this tensor are encoded."""
        return len(spec.shape) > 1 and spec.num_elements >= self.least

    def encoder(self, layout: Layout) -> PieceEncoder:
        return PieceEncoder(self, layout)

    def preparation(self, layout: Layout) -> Preparation | None:
        """Return new preprocessing for a worker's gradients, or None if the codec has none."""
        return None

    def short(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor that is not encoded is sent."""
        return self.fallback_dtype if dtype.itemsize > _HALF_BYTES else dtype

    def encoded_bytes(self, layout: Layout) -> int:
        return max((piece.end for piece in all_pieces(self, layout)), default=0)

    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None:
        for piece in all_pieces(self, layout):
            self.write(piece, piece.of_payload(payload), out)

    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        for piece in all_pieces(self, layout):
            self.read(piece, encoded, piece.of_payload(payload))
        for spec, offset, end in layout.entries if self.without else ():
            if spec.kind is Kind.PARAMETER and spec.name in self.without:
                payload[offset:end].zero_()

    def write(self, piece: Piece, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode `values`, [n] of the piece's dtype, into the piece's bytes of `out`, uint8 [encoded_bytes]."""
        target = out[piece.start : piece.end]
        if piece.is_encoded:
            self.encode_piece(values.float(), target)
        else:
            target.view(self.short(piece.dtype)).copy_(values)

    def read(self, piece: Piece, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode the piece's bytes of `encoded`, uint8 [encoded_bytes], into `values`, [n] of the piece's dtype."""
        source = encoded[piece.start : piece.end]
        if not piece.is_encoded:
            values.copy_(source.view(self.short(piece.dtype)))
        elif piece.dtype is torch.float32:
            self.decode_piece(source, values)
        else:
            decoded = ROOM.of("decoded", values.shape)
            self.decode_piece(source, decoded)
            values.copy_(decoded)


class Preparation(Protocol):
    """Preprocessing of one worker's gradients before they are encoded, with its own memory."""

    def begin(self, groups: Sequence[Hyperparameters]) -> None:
        """Store the hyperparameters with which the server's optimizer began."""

    def codec(self, version: int) -> Codec:
        """Return the codec of the next contribution, which is computed on the weights of `version`."""

    def apply(self, piece: Piece, values: torch.Tensor) -> None:
        """Replace the gradient of a piece, [n] of its dtype, by the values to send."""

    def rest(self, piece: Piece) -> None:
        """Leave the memory of a piece as it is, because its tensor has no gradient."""

    def commit(self) -> None:
        """Keep the new memory, because the newest contribution counts."""

    def reset(self) -> None:
        """Clear the memory, because the server has cleared its own."""

    def hyperparameters(self, groups: tuple[Hyperparameters, ...]) -> tuple[Hyperparameters, ...]:
        """Return the hyperparameters to send with the newest contribution."""


class PieceEncoder(Encoder):
    """An encoder that can also encode single pieces."""

    codec: ByTensor

    def write(self, piece: Piece, values: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.write(piece, values, out)


@lru_cache(256)
def only_rest(codec: ByTensor, without: frozenset[str]) -> ByTensor:
    """Return the codec for payloads without these tensors, such as those of other fragments. The result is cached."""
    if without == codec.without:
        return codec
    rest = copy.copy(codec)
    rest.without = without
    return rest


@lru_cache(256)  # called for every contribution
def pieces_of(codec: ByTensor, layout: Layout) -> list[list[Piece]]:
    """Return the pieces of every parameter, in the order of a payload. A parameter that is not sent has no pieces."""
    found: list[list[Piece]] = []
    at, last = 0, ""
    for spec, offset, end in layout.entries:
        if spec.kind is Kind.PARAMETER and spec.name in codec.without:
            found.append([])
        elif spec.kind is Kind.PARAMETER:
            if codec.aligns or spec.dtype != last:
                at = aligned(at)
            pieces: list[Piece] = []
            dtype, is_encoded, rows = DTYPES[spec.dtype], codec.encodes(spec), spec.shape[0] if spec.shape else 1
            stride = codec.piece * dtype.itemsize
            for start in range(offset, end, stride):
                stop = min(end, start + stride)
                count = (stop - start) // dtype.itemsize
                size = codec.size_of(count, rows) if is_encoded else count * codec.short(dtype).itemsize
                pieces.append(Piece(dtype, start, stop, at, at + size, is_encoded, rows, spec.name))
                at += size
            found.append(pieces)
            last = spec.dtype
    return found


def all_pieces(codec: ByTensor, layout: Layout) -> Iterator[Piece]:
    """Return the pieces of all parameters, in the order of a payload."""
    return chain.from_iterable(pieces_of(codec, layout))


def aligned(at: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Room(threading.local):
    """Scratch memory of each thread, reused for every piece, because the first touch of new memory is slow."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, Sequence[int], torch.dtype], torch.Tensor] = {}

    def of(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor with old contents. Calls with the same `name` return the same memory."""
        if (view := self._views.get((name, shape, dtype))) is None:
            num_bytes = math.prod(shape) * dtype.itemsize
            if name not in self._kept or len(self._kept[name]) < num_bytes:
                self._kept[name] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                self._views.clear()  # they keep the smaller memory
            elif len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[name, shape, dtype] = self._kept[name][:num_bytes].view(dtype).view(shape)
        return view


ROOM = Room()


def blocks_of(values: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    """Return [n] as whole blocks and a shorter last block: (index of the first block, [blocks, size]) of each."""
    full, rest = divmod(len(values), size)
    found = [(0, values[: full * size].view(full, size))] if full else []
    return [*found, (full, values[full * size :].view(1, -1))] if rest else found


def sizes_of(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the largest absolute value of each of `blocks`, float32 [blocks, n], to `out`, float32 [blocks].

    A block with NaN gets NaN. Returns `out`.
    """
    torch.abs(blocks, out=ROOM.of("work", blocks.shape))
    # The bits of positive floats, read as integers, have the same order, and NaN is the largest.
    torch.amax(ROOM.of("work", blocks.shape, torch.int32), 1, out=out.view(torch.int32))
    return out


def largest(chunks: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Return the positions of the `num_kept` largest absolute values in each chunk, int64 [chunks, num_kept].

    `chunks` is float32 [chunks, n]. The positions ascend, and NaN counts as the largest value.
    """
    sizes = chunks.abs()
    bits = sizes.numpy().view(np.int32)  # the same order as the sizes; ten times faster than torch.topk
    least = np.partition(bits, -num_kept, axis=1)[:, -num_kept, None]
    is_kept = bits >= least
    ties = np.flatnonzero(is_kept.sum(1) > num_kept)
    if len(ties):  # equal values at the limit: keep only as many as needed
        is_kept[ties] = False
        first = sizes[ties].topk(num_kept).indices.numpy()
        is_kept[ties[:, None], first] = True
    flat = np.flatnonzero(is_kept).reshape(len(chunks), num_kept)
    return torch.from_numpy(flat - np.arange(len(chunks))[:, None] * chunks.shape[1])


def scatter(chunks: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values`, [chunks, k], to their positions in `chunks`, zeros [chunks, n].

    Raises ValueError for positions that are out of range or do not ascend.
    """
    first, last = int(places[:, 0].min()), int(places[:, -1].max())
    if first < 0 or last >= chunks.shape[1] or not bool((places[:, 1:] > places[:, :-1]).all()):
        raise ValueError(f"positions that do not ascend within 0 to {chunks.shape[1] - 1}")
    chunks.scatter_(1, places, values)


# ---- in blocks -----------------------------------------------------------------------------------
# Base of the codecs with a scale for each block of 256 values.
#
# A piece of n values is encoded as a float32 scale for each block, then a code of `bits` bits for each value. The
# last byte is padded with zero bits.


BLOCK = 256  # values; a multiple of the codes in a byte
TINY = torch.finfo(torch.float32).tiny
_SCALE_BYTES = 4


class InBlocks(ByTensor):
    bits: ClassVar[int]  # size of a code

    def size(self, num_elements: int) -> int:
        return -(-num_elements // BLOCK) * _SCALE_BYTES + -(-num_elements * self.bits // 8)

    def parts(
        self, values: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (values, scales, codes) of all whole blocks, then of the shorter last block, if any.

        Shapes: values [blocks, n], scales float32 [blocks], codes uint8 [bytes].
        """
        num_bytes = -(-len(values) // BLOCK) * _SCALE_BYTES
        scales, codes = encoded[:num_bytes].view(torch.float32), encoded[num_bytes:]
        for first, block in blocks_of(values, BLOCK):
            begin, size = first * BLOCK * self.bits // 8, -(-block.numel() * self.bits // 8)
            yield block, scales[first : first + len(block)], codes[begin : begin + size]
