"""Weights that are on their way from one shard: what of them has come, in case their stream is lost in the middle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ...common.tensors.layout import as_bytes
from ...common.wire.frames import CHUNK_BYTES
from ...proto import parameter_server_pb2 as pb

if TYPE_CHECKING:
    import torch

Write = Callable[[int, memoryview], None]
Targets = Callable[[int, int], Iterator[memoryview]]


class Half:
    """Of the answer to contribution `number` (0: of the final weights), a body of `num_bytes` in `codec`. Bytes are the
    same in every answer of one `version`; or, of differences, in everyone that begins at one reference, `first`."""

    def __init__(self, number: int, version: int, codec: str, num_bytes: int, first: int = 0) -> None:
        self.number, self.version, self.codec, self.num_bytes, self.first = number, version, codec, num_bytes, first
        self.memory: torch.Tensor | None = None  # where bytes lie that are not raw, uint8 [num_bytes]
        self.has_all = False  # and the model has the weights
        self._ranges: list[tuple[int, int]] = []

    def goes_on_from(self, old: Half | None) -> bool:
        """Whether what came of `old` is of this one as well; it is taken over."""
        if old is None or (old.number, old.codec, old.first) != (self.number, self.codec, self.first):
            return False
        if not self.first and (old.version, old.num_bytes) != (self.version, self.num_bytes):
            return False
        self._ranges, self.memory, self.has_all = old._ranges, old.memory, old.has_all
        return True

    def came(self, start: int, end: int) -> None:
        if self._ranges and self._ranges[-1][1] == start:
            self._ranges[-1] = self._ranges[-1][0], end
        else:
            self._ranges.append((start, end))

    def noting(self, write: Write) -> Write:
        def write_and_note(offset: int, data: memoryview) -> None:
            write(offset, data)
            self.came(offset, offset + len(data))

        return write_and_note

    def targets(self, targets: Targets) -> Targets:
        """The same places, in pieces so small that little is lost of one that breaks off."""

        def in_pieces(offset: int, num_bytes: int) -> Iterator[memoryview]:
            for target in targets(offset, num_bytes):
                for at in range(0, len(target), CHUNK_BYTES):
                    piece = target[at : at + CHUNK_BYTES]
                    yield piece
                    self.came(offset, offset + len(piece))
                    offset += len(piece)

        return in_pieces

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Bytes [start, end) that are here, ascending, apart."""
        if self.has_all:
            return [(0, self.num_bytes)]
        found: list[tuple[int, int]] = []
        for start, end in sorted(self._ranges):
            if found and start <= found[-1][1]:
                first, last = found.pop()
                start, end = first, max(last, end)
            found.append((start, end))
        return found

    def said(self, targets: Targets) -> pb.Held:
        """To the server; raw bytes lie in `targets`."""
        held = pb.Held(step=self.number, version=self.version, codec=self.codec, body_bytes=self.num_bytes)
        crc = 0
        for start, end in self.ranges:
            held.ranges.extend((start, end))
            for piece in self._lying(start, end, targets) if not self.has_all else ():
                crc = zlib.crc32(piece, crc)
        held.crc = crc
        return held

    def _lying(self, start: int, end: int, targets: Targets) -> Iterable[memoryview]:
        return targets(start, end - start) if self.memory is None else [as_bytes(self.memory)[start:end]]
