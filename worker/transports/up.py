"""Contributions on their way to one shard."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
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
        self._model, self.transfer, self._send = model, transfer, send
        self.encoding = Encoding(codec, model.layout, model.num_exchanged)
        self._kind = ContributionKind.GRADIENT  # kind of the newest contribution
        self._offered: pb.PartialTransfer | None = None  # bytes that the server has of the next contribution
        self._is_out_of_band = False  # payloads of raw bytes travel beside the stream
        self.departed: set[int] = set()  # indices of tensors whose gradients were sent early

    def joined(self, transport: Transport, welcome: pb.Welcome | None = None) -> None:
        """A new stream is open. Everything sent on the old one may be lost, except for a partial transfer."""
        self.transport = transport
        is_offered = welcome is not None and welcome.HasField("partial_transfer")
        self._offered = welcome.partial_transfer if welcome is not None and is_offered else None
        is_large = self._model.layout.exchange_bytes > INLINE_BYTES
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
        codec, num_bytes = self.encoding.codec, payload_bytes(self.encoding.codec, self._model.layout)
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
            rest = [index for index in range(self._model.num_exchanged) if index not in self.departed]
            self.departed.clear()
        codec, num_bytes, is_outside = self.encoding.codec, self._model.layout.exchange_bytes, self._is_out_of_band
        is_encoded = not codec.is_identity or self.encoding.residual is not None
        if is_encoded:
            num_bytes, is_outside = payload_bytes(codec, self._model.layout), False
        payload = PayloadInfo(codec.name, num_bytes, is_outside, contribution.payload.without_gradient)
        announced = contribution_message(changed(contribution, **topics, payload=payload))
        if is_encoded and rest is None:
            self._contribute_encoded(announced, kind)
            return
        may_continue = rest is None and self._offered and self.transport.segment is None and self.transfer.lies_here
        if may_continue and self._continue(announced, list(self.transfer.gather(kind)[0].pieces), self.transport.raw):
            return
        if rest is None and not self._is_out_of_band and num_bytes <= INLINE_BYTES:
            self._send([frame(announced, 0, self.transfer.gather(kind, None)[0].pieces)])
        else:
            self._send([frame(announced)])
            self._send_tensors(kind, rest)
            if is_encoded:
                self.encoding.completed()

    def _contribute_encoded(self, announced: pb.WorkerMessage, kind: ContributionKind) -> None:
        payload = self.encoding.payload
        if payload is None:
            payload = self.encoding.whole(self.transfer.gather(kind, None)[0])
        if self._continue(announced, [payload], self.transport.messages):
            return
        is_small = len(payload) <= INLINE_BYTES
        self._send([frame(announced, 0, [payload] if is_small else [])])
        for frames in self.transport.messages([] if is_small else [payload]):
            self._send(frames)

    def _continue(self, announced: pb.WorkerMessage, pieces: list[memoryview], carry: Carry) -> bool:
        """Send what the server lacks of a payload whose stream broke off (`ps/wire/partial_transfers.py`).

        Returns False if it has nothing of this payload. Then nothing was sent.
        """
        seq, payload = announced.contribution.seq, announced.contribution.payload
        num_bytes, codec = payload.num_bytes, payload.codec
        offered, self._offered = self._offered, None  # for one attempt
        if offered is None or (offered.seq, offered.payload_bytes, offered.codec) != (seq, num_bytes, codec):
            return False
        # By turns what the server lacks and what it has.
        borders = pairwise([0, *offered.ranges, num_bytes])
        stretches, crc = [(start, between(pieces, start, end)) for start, end in borders], 0
        for part in chain.from_iterable(parts for _, parts in stretches[1::2]):
            crc = zlib.crc32(part, crc)
        if crc != offered.crc:
            log.warning("not_continued", seq=seq, meaning="the server's bytes are of another payload: all are sent")
            return False
        num_sent = sum(len(part) for _, parts in stretches[::2] for part in parts)
        log.info("continued", seq=seq, num_bytes=num_sent, of=num_bytes)
        begin = pb.Begin(num_bytes=num_bytes, codec=codec, in_shared_memory=payload.in_shared_memory, continues=seq)
        self._send([frame(pb.WorkerMessage(begin=begin)), frame(announced)])
        for start, parts in stretches[::2]:
            for frames in carry(parts, start):
                self._send(frames)
        return True

    def _send_tensors(self, kind: ContributionKind, indices: list[int] | None) -> None:
        if self.encoding.codec.is_identity:
            sent = self.transport.send(self.transfer, kind, indices)
            # Tensors from other processes are fetched as fast as the connection takes them.
            for frames in sent if self.transfer.lies_here else [chain.from_iterable(sent)]:
                self._send(frames)
            return
        for stretch, tensors in zip(self.transfer.gather(kind, indices), self._model.stretches(indices), strict=True):
            start, encoded = self.encoding.part(stretch, tensors)
            for frames in self.transport.messages([encoded], start):
                self._send(frames)


def between(pieces: Iterable[memoryview], start: int, end: int) -> list[memoryview]:
    """Bytes [start, end) of a payload, as parts of its pieces."""
    found, at = [], 0
    for piece in pieces:
        if part := piece[max(0, start - at) : max(0, end - at)]:
            found.append(part)
        at += len(piece)
    return found
