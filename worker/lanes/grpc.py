"""The lane that is always there: the bytes of a body are on the stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...common.wire.frames import body_frames
from ..tensors.transfer import Indices, Source, Transfer
from .base import Lane


class GrpcLane(Lane):
    """Pieces of a body as messages of their own."""

    name = "tcp"

    def send(self, transfer: Transfer, source: Source, indices: Indices) -> Iterator[Iterable[bytes]]:
        for stretch in transfer.gather(source, indices):
            yield body_frames(stretch.pieces, stretch.offset)
