"""What codecs share that encode each tensor for itself: which tensors they encode, and where each lies.

A tensor of one dimension (a bias, a norm's scale), or a small one, is hardly any of the bytes and much of the result:
it travels as bf16. Any other is cut into pieces of `piece` elements, in C order, the last one shorter; each piece is
encoded by itself, from float32. Tensors are in the order of the payload, each from a multiple of 8 bytes on. Pieces fit
into a core's cache, so that all that is done with one costs one pass over the memory.
"""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ...tensors.layout import DTYPES, Kind, Layout, TensorSpec
from ...tensors.optimizers import Hyperparameters
from ..base import Codec, SelfContained

_ALIGNMENT_BYTES = 8  # an element of any dtype may be viewed in place
_HALF_BYTES = 2
_MAX_VIEWS = 256  # of kept memory: making one takes as long as work on 10 KiB


class Piece(NamedTuple):
    """Elements of `dtype` that are encoded together: bytes [offset, offset_end) of a payload, bytes [start, end) of
    what is sent."""

    dtype: torch.dtype
    offset: int
    offset_end: int
    start: int
    end: int
    is_encoded: bool  # else it is bf16, or as it is where that is no longer
    rows: int  # of the whole tensor

    def of_payload(self, payload: torch.Tensor) -> torch.Tensor:
        """[n] of `dtype` of uint8 [>= offset_end]; shares memory."""
        return payload[self.offset : self.offset_end].view(self.dtype)


class ByTensor(SelfContained):
    """A codec of pieces. Subclasses say how one is encoded."""

    goes_in_parts = has_feedback = True
    takes_weights = False
    largest = torch.finfo(torch.float32).max
    fallback_dtype = torch.bfloat16  # of what is not encoded
    aligns = True  # every tensor; else only the first one of a dtype
    least: ClassVar[float] = 1024  # elements of a tensor that is encoded
    piece: ClassVar[int] = 1 << 17  # elements; 512 KiB of float32
    without: frozenset[str] = frozenset()  # tensors that are not in what is sent (`only_rest`); decoded they are zeros

    def size(self, num_elements: int) -> int:
        """Bytes of an encoded piece."""
        raise NotImplementedError

    def size_of(self, num_elements: int, rows: int) -> int:
        """The same, of a piece of a tensor with so many rows."""
        return self.size(num_elements)

    def encode_piece(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """float32 [n] to uint8 [size(n)], all of it. Where a value is NaN or Inf, what is decoded has one as well."""
        raise NotImplementedError

    def decode_piece(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Back, to float32 [n]. May raise anything for bytes that `encode_piece` does not make."""
        raise NotImplementedError

    def encodes(self, spec: TensorSpec) -> bool:
        """Whether pieces of this tensor are encoded."""
        return len(spec.shape) > 1 and spec.num_elements >= self.least

    def encoder(self, layout: Layout) -> PieceEncoder:
        return PieceEncoder(self, layout)

    def preparation(self, layout: Layout) -> Preparation | None:
        """A new one, for a worker's gradients before they are encoded; None: they are encoded as they are."""
        return None

    def short(self, dtype: torch.dtype) -> torch.dtype:
        """What it travels in where it is not encoded."""
        return self.fallback_dtype if dtype.itemsize > _HALF_BYTES else dtype

    def encoded_bytes(self, layout: Layout) -> int:
        return max((piece.end for pieces in pieces_of(self, layout) for piece in pieces), default=0)

    def encode(self, layout: Layout, payload: torch.Tensor, out: torch.Tensor) -> None:
        for pieces in pieces_of(self, layout):
            for piece in pieces:
                self.write(piece, piece.of_payload(payload), out)

    def decode(self, layout: Layout, encoded: torch.Tensor, payload: torch.Tensor) -> None:
        for pieces in pieces_of(self, layout):
            for piece in pieces:
                self.read(piece, encoded, piece.of_payload(payload))
        for spec, offset, end in layout.entries if self.without else ():
            if spec.kind is Kind.PARAMETER and spec.name in self.without:
                payload[offset:end].zero_()

    def write(self, piece: Piece, values: torch.Tensor, out: torch.Tensor) -> None:
        """`values` [n] of the piece's dtype, to its place in `out`, uint8 [encoded_bytes]."""
        target = out[piece.start : piece.end]
        if piece.is_encoded:
            self.encode_piece(values.float(), target)
        else:
            target.view(self.short(piece.dtype)).copy_(values)

    def read(self, piece: Piece, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Back."""
        source = encoded[piece.start : piece.end]
        if not piece.is_encoded:
            values.copy_(source.view(self.short(piece.dtype)))
        elif piece.dtype is torch.float32:
            self.decode_piece(source, values)
        else:
            decoded = ROOM.of("decoded", values.shape)
            self.decode_piece(source, decoded)
            values.copy_(decoded)


class Preparation(ABC):
    """What one worker does with its gradients before they are encoded, with a memory of its own."""

    @abstractmethod
    def begin(self, groups: Sequence[Hyperparameters]) -> None:
        """The server's optimizer began with these hyperparameters."""

    @abstractmethod
    def codec(self, version: int) -> Codec:
        """The codec of the next contribution, which is computed on the weights of `version`."""

    @abstractmethod
    def apply(self, piece: Piece, values: torch.Tensor) -> None:
        """Change the gradient of a piece, [n] of its dtype, to what is sent."""

    @abstractmethod
    def commit(self) -> None:
        """The newest contribution counts."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: the server has."""

    @abstractmethod
    def hyperparameters(self, groups: tuple[Hyperparameters, ...]) -> tuple[Hyperparameters, ...]:
        """The hyperparameters to send with the newest contribution."""


class PieceEncoder:
    """A `Coder` that also encodes pieces as they come. What remembers is a subclass, with all four."""

    def __init__(self, codec: ByTensor, layout: Layout) -> None:
        self._codec, self._layout = codec, layout

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._codec.encode(self._layout, source, target)

    def write(self, piece: Piece, values: torch.Tensor, out: torch.Tensor) -> None:
        self._codec.write(piece, values, out)

    def commit(self) -> None:
        """Nothing is remembered."""

    def rollback(self) -> None:
        """Nothing is remembered."""


@lru_cache(256)
def only_rest(codec: ByTensor, without: frozenset[str]) -> ByTensor:
    """The codec for payloads that have nothing of these tensors, such as other fragments'; the same one each time."""
    if without == codec.without:
        return codec
    rest = copy.copy(codec)
    rest.without = without
    return rest


@lru_cache(256)  # asked for with every contribution
def pieces_of(codec: ByTensor, layout: Layout) -> list[list[Piece]]:
    """Of every parameter, in the order of a payload; none of those that are not sent."""
    found: list[list[Piece]] = []
    at, last = 0, ""
    for spec, offset, end in layout.entries:
        if spec.kind is Kind.PARAMETER and spec.name in codec.without:
            found.append([])
        elif spec.kind is Kind.PARAMETER:
            if codec.aligns or spec.dtype != last:
                at = aligned(at)
            found.append(list(_cut(codec, spec, offset, end, at)))
            at, last = found[-1][-1].end if found[-1] else at, spec.dtype
    return found


def aligned(at: int) -> int:
    """The next place where a tensor may begin."""
    return -(-at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _cut(codec: ByTensor, spec: TensorSpec, offset: int, offset_end: int, at: int) -> Iterator[Piece]:
    dtype, is_encoded, rows = DTYPES[spec.dtype], codec.encodes(spec), spec.shape[0] if spec.shape else 1
    stride = codec.piece * dtype.itemsize
    for start in range(offset, offset_end, stride):
        end = min(offset_end, start + stride)
        num_elements = (end - start) // dtype.itemsize
        size = codec.size_of(num_elements, rows) if is_encoded else num_elements * codec.short(dtype).itemsize
        yield Piece(dtype, start, end, at, at + size, is_encoded, rows)
        at += size


class Room(threading.local):
    """Memory for work on one piece after another, each thread's its own: what is new costs more to touch than to
    fill."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, Sequence[int], torch.dtype], torch.Tensor] = {}

    def of(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`shape` of `dtype`, with old contents; the same memory each time that `name` is asked for."""
        found = self._views.get((name, shape, dtype))
        return found if found is not None else self._make(name, shape, dtype)

    def _make(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._kept or len(self._kept[name]) < num_bytes:
            self._kept[name] = torch.empty(num_bytes, dtype=torch.uint8)
            self._views.clear()  # of what is smaller
        elif len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = self._views[name, shape, dtype] = self._kept[name][:num_bytes].view(dtype).view(shape)
        return view


ROOM = Room()


def blocks_of(values: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    """[n] as blocks: the number of the first one, and [blocks, size]; what is left over is a shorter one."""
    full, rest = divmod(len(values), size)
    if not rest:
        return [(0, values.view(full, size))] if full else []
    found = [(0, values[: full * size].view(full, size))] if full else []
    return [*found, (full, values[full * size :].view(1, -1))]


def sizes_of(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The largest size in each of `blocks`, float32 [blocks, n], to `out`, float32 [blocks]; NaN where there is one."""
    torch.abs(blocks, out=ROOM.of("work", blocks.shape))
    # Their bits as whole numbers are in the same order, NaN last, and need no look for it.
    torch.amax(ROOM.of("work", blocks.shape, torch.int32), 1, out=out.view(torch.int32))
    return out


def largest(chunks: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Of each chunk, float32 [chunks, n], the places of so many values that are largest in size, ascending, int64. NaN
    is larger than all."""
    sizes = chunks.abs()
    bits = sizes.numpy().view(np.int32)  # in the order of the sizes; ten times faster than torch.topk
    least = np.partition(bits, -num_kept, axis=1)[:, -num_kept, None]
    is_kept = bits >= least
    ties = np.flatnonzero(is_kept.sum(1) > num_kept)
    if len(ties):  # of values that are the same not all
        is_kept[ties] = False
        first = sizes[ties].topk(num_kept).indices.numpy()
        is_kept[ties[:, None], first] = True
    flat = np.flatnonzero(is_kept).reshape(len(chunks), num_kept)
    return torch.from_numpy(flat - np.arange(len(chunks))[:, None] * chunks.shape[1])


def scatter(chunks: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """`values`, [chunks, k], to their places in zeros, [chunks, n]. ValueError for one that is no place, or is there
    twice."""
    first, last = int(places[:, 0].min()), int(places[:, -1].max())
    if first < 0 or last >= chunks.shape[1] or not bool((places[:, 1:] > places[:, :-1]).all()):
        raise ValueError(f"places that do not ascend from 0 to {chunks.shape[1] - 1} at most")
    chunks.scatter_(1, places, values)
