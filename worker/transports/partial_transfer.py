"""Continues a payload after its stream broke off: the worker sends only the bytes that the server lacks.

`ps/wire/partial_transfers.py` is the server's side.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from ...common.reporting.log import get_logger
from ...proto import parameter_server_pb2 as pb

log = get_logger()


class PartialTransfer:
    """The part of the next contribution that the server has, according to its Welcome. Valid for one attempt."""

    def __init__(self, welcome: pb.Welcome | None) -> None:
        has_some = welcome is not None and welcome.HasField("partial_transfer")
        self._offered = welcome.partial_transfer if has_some and welcome is not None else None

    def __bool__(self) -> bool:
        return self._offered is not None

    def rest(self, begin: pb.Begin, seq: int, pieces: list[memoryview]) -> list[tuple[int, list[memoryview]]] | None:
        """The stretches of this payload that the server lacks, with their offsets. Sets `begin.continues`.

        Returns None if the server has no bytes, or bytes of another payload.
        """
        offered, self._offered = self._offered, None
        if offered is None or (offered.seq, offered.payload_bytes, offered.codec) != (
            seq,
            begin.num_bytes,
            begin.codec,
        ):
            return None
        ranges = list(zip(offered.ranges[::2], offered.ranges[1::2], strict=False))
        stretches, crc = list(divided(pieces, ranges)), 0
        for part in (part for _, parts, is_there in stretches if is_there for part in parts):
            crc = zlib.crc32(part, crc)
        if crc != offered.crc:
            log.warning("not_continued", seq=seq, meaning="the server's bytes are of another payload: all are sent")
            return None
        begin.continues = seq
        rest = [(at, parts) for at, parts, is_there in stretches if not is_there]
        num_bytes = sum(len(part) for _, parts in rest for part in parts)
        log.info("continued", seq=seq, num_bytes=num_bytes, of=begin.num_bytes)
        return rest


def divided(
    pieces: Iterable[memoryview], ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, list[memoryview], bool]]:
    """Cut the pieces of a payload at the borders of `ranges` [start, end), which are ascending and disjoint.

    Yields the offset of each stretch, its parts, and whether it is one of the ranges.
    """
    at, found = 0, list(pieces)[::-1]
    borders = [border for start, end in ranges for border in ((start, False), (end, True))]
    for border, is_in in [*borders, (sum(map(len, found)), False)]:
        start, parts = at, []
        while at < border and found:
            piece = found.pop()
            parts.append(piece[: border - at])
            if len(piece) > border - at:
                found.append(piece[border - at :])
            at += len(parts[-1])
        if parts:
            yield start, parts, is_in
