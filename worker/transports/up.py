"""Contributions on their way to one shard."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ...common.codecs.base import Codec, payload_bytes
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.wire.frames import INLINE_BYTES, frame
from ...common.wire.messages import contribution_message
from ...common.wire.records import COUNTED, Contribution, Outcome, PayloadInfo, changed
from ...proto import parameter_server_pb2 as pb
from ..tensors.transfer import DirectTransfer, ModelTensors
from .encoding import Encoding
from .transport import Messages, Transport

log = get_logger()

Carry = Callable[[list[memoryview], int], Iterator[Messages]]


class Up:
    """Sends one shard's part of this worker's contributions.

    `send` puts messages on the stream. `transport` carries the bytes of payloads during one stream.
    """

    transport: Transport

    def __init__(
        self, codec: Codec, model: ModelTensors, transfer: DirectTransfer, send: Callable[[Messages], None]
    ) -> None:
        self._layout, self._num_exchanged = model.layout, model.num_exchanged
        self.transfer, self._stretches = transfer, model.stretches
        self._send = send
        self.encoding = Encoding(codec, model.layout, model.num_exchanged)
        self._kind = ContributionKind.GRADIENT  # kind of the newest contribution
        self._offered: pb.PartialTransfer | None = None  # bytes that the server has of the next contribution
        self._is_out_of_band = False  # payloads of raw bytes travel beside the stream
        self.departed: set[int] = set()  # indices of tensors whose gradients were sent early

    def joined(self, transport: Transport, welcome: pb.Welcome) -> None:
        """A new stream is open. Everything sent on the old one may be lost, except for a partial transfer."""
        self.transport = transport
        self._offered = welcome.partial_transfer if welcome.HasField("partial_transfer") else None
        is_large = self._layout.exchange_bytes > INLINE_BYTES
        self._is_out_of_band = transport.segment is not None or (transport.is_beside_stream and is_large)
        self.departed.clear()
        self.transfer.forget_copies()
        self.encoding.recall()

    def replied(self, outcome: Outcome) -> None:
        """Handle the contribution's outcome."""
        if outcome in COUNTED:
            if not self.encoding.is_raw or self.encoding.residual is not None:
                self.encoding.commit()
        elif outcome == Outcome.START:
            self.encoding.start()
        else:
            # The steps of a dropped delta are still in the model, so they go with the next contribution.
            is_work = self._kind.holds_differences and outcome == Outcome.DROPPED
            self.encoding.rollback(self.transfer.gather(self._kind, None)[0] if is_work else None)

    # ---- ahead of the contribution ------------------------------------------------------------

    def prepare(self, indices: list[int]) -> bool:
        """Start copying these gradients off their device. Returns False if they are on the host."""
        return self.transfer.prepare(indices, self.transport.segment)

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors before their contribution. Some codecs do not support it."""
        if not self.departed:
            self._begin()
        self.departed.update(indices)
        self._send_tensors(ContributionKind.GRADIENT, indices)

    def recall(self) -> None:
        """Discard the gradients that were sent early, and the copies of others."""
        self.transfer.forget_copies()
        if self.departed:
            self.departed.clear()
            self.encoding.recall()
            self._begin()

    def _begin(self) -> None:
        codec, num_bytes = self.encoding.codec, payload_bytes(self.encoding.codec, self._layout)
        is_out_of_band = codec.is_identity and self._is_out_of_band
        begin = pb.Begin(num_bytes=num_bytes, codec=codec.name, in_shared_memory=is_out_of_band)
        self._send([frame(pb.WorkerMessage(begin=begin))])

    # ---- the contribution ---------------------------------------------------------------------

    def contribute(self, contribution: Contribution, **topics: Any) -> None:
        """Send a contribution, with these topics for this shard.

        Without a reply, the same bytes are sent again, or only the missing ones.
        """
        self._kind = kind = contribution.kind
        if not kind.has_payload:
            self._send([frame(contribution_message(changed(contribution, **topics)))])
            return
        rest: list[int] | None = None
        if self.departed:
            rest = [index for index in range(self._num_exchanged) if index not in self.departed]
            self.departed.clear()
        encoding, transport, is_outside = self.encoding, self.transport, self._is_out_of_band
        codec, num_bytes = encoding.codec, self._layout.exchange_bytes
        is_encoded = not codec.is_identity or encoding.residual is not None
        if is_encoded:
            num_bytes, is_outside = payload_bytes(codec, self._layout), False
        payload = PayloadInfo(codec.name, num_bytes, is_outside, contribution.payload.without_gradient)
        announced = contribution_message(changed(contribution, **topics, payload=payload))
        if rest is not None:
            self._send([frame(announced)])
            self._send_tensors(kind, rest)
            if is_encoded:
                encoding.completed()
            return
        has_memory_here = transport.segment is None and self.transfer.lies_here
        may_continue = self._offered is not None and (is_encoded or has_memory_here)
        is_small, pieces = not is_outside and num_bytes <= INLINE_BYTES, list[memoryview]()
        if is_encoded:
            pieces = [encoding.whole(self.transfer.gather(kind)[0]) if encoding.payload is None else encoding.payload]
        elif is_small or may_continue:
            pieces = list(self.transfer.gather(kind)[0].pieces)
        if may_continue and self._continue(announced, pieces, transport.messages if is_encoded else transport.raw):
            return
        self._send([frame(announced, 0, pieces if is_small else ())])
        if is_encoded and not is_small:
            for frames in transport.messages(pieces):
                self._send(frames)
        elif not is_small:
            self._send_tensors(kind, None)

    def _continue(self, announced: pb.WorkerMessage, pieces: list[memoryview], carry: Carry) -> bool:
        """Send the rest of a payload whose stream broke off: `ps/wire/partial_transfers.py` is the server's side.

        Returns False if the server has bytes of another payload; then nothing was sent.
        """
        offered, self._offered = self._offered, None  # for one attempt
        seq, payload = announced.contribution.seq, announced.contribution.payload
        expected = seq, payload.num_bytes, payload.codec
        if offered is None or (offered.seq, offered.payload_bytes, offered.codec) != expected:
            return False
        ranges = list(zip(offered.ranges[::2], offered.ranges[1::2], strict=False))
        stretches, crc = list(divided(pieces, ranges)), 0
        for part in (part for _, parts, is_there in stretches if is_there for part in parts):
            crc = zlib.crc32(part, crc)
        if crc != offered.crc:
            log.warning("not_continued", seq=seq, meaning="the server's bytes are of another payload: all are sent")
            return False
        rest = [(at, parts) for at, parts, is_there in stretches if not is_there]
        log.info("continued", seq=seq, num_bytes=sum(len(part) for _, parts in rest for part in parts), of=expected[1])
        is_outside = payload.in_shared_memory
        begin = pb.Begin(num_bytes=expected[1], codec=expected[2], in_shared_memory=is_outside, continues=seq)
        self._send([frame(pb.WorkerMessage(begin=begin)), frame(announced)])
        for at, parts in rest:
            for frames in carry(parts, at):
                self._send(frames)
        return True

    def _send_tensors(self, kind: ContributionKind, indices: list[int] | None) -> None:
        if self.encoding.codec.is_identity:
            sent = self.transport.send(self.transfer, kind, indices)
            # Tensors from other processes are fetched as fast as the connection takes them.
            for frames in sent if self.transfer.lies_here else [chain.from_iterable(sent)]:
                self._send(frames)
            return
        for stretch, tensors in zip(self.transfer.gather(kind, indices), self._stretches(indices), strict=True):
            start, encoded = self.encoding.part(stretch, tensors)
            for frames in self.transport.messages([encoded], start):
                self._send(frames)


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
