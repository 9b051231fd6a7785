"""Contributions on their way to one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from ...common.codecs.base import Codec, payload_bytes
from ...common.kinds import ContributionKind
from ...common.wire.frames import INLINE_BYTES, frame
from ...common.wire.messages import contribution_message
from ...common.wire.records import COUNTED, Contribution, Outcome, PayloadInfo, changed
from ...proto import parameter_server_pb2 as pb
from ..tensors.transfer import DirectTransfer, ModelTensors
from .encoding import Encoding
from .partial_transfer import PartialTransfer
from .transport import Messages, Transport

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
        self._partial = PartialTransfer(None)
        self.departed: set[int] = set()  # indices of tensors whose gradients were sent early

    @property
    def num_bytes(self) -> int:
        """Encoded size of a contribution, in bytes."""
        return payload_bytes(self.encoding.codec, self._layout)

    def joined(self, transport: Transport, welcome: pb.Welcome | None = None) -> None:
        """A new stream is open. Everything sent on the old one may be lost, except for a partial transfer."""
        self.transport, self._partial = transport, PartialTransfer(welcome)
        self.departed.clear()
        self.transfer.forget_copies()
        self.encoding.recall()

    def replied(self, outcome: Outcome) -> None:
        """Handle the contribution's outcome."""
        if outcome in COUNTED:
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
        codec = self.encoding.codec
        is_out_of_band = codec.is_identity and self._is_out_of_band
        begin = pb.Begin(num_bytes=self.num_bytes, codec=codec.name, in_shared_memory=is_out_of_band)
        self._send([frame(pb.WorkerMessage(begin=begin))])

    # ---- the contribution ---------------------------------------------------------------------

    def contribute(self, contribution: Contribution) -> None:
        """Send a contribution. Without a reply, the same bytes are sent again, or only the missing ones."""
        self._kind = kind = contribution.kind
        if not kind.has_payload:
            self._send([frame(contribution_message(contribution))])
            return
        rest: list[int] | None = None
        if self.departed:
            rest = [index for index in range(self._num_exchanged) if index not in self.departed]
            self.departed.clear()
        if not self.encoding.codec.is_identity or self.encoding.owes:
            self._contribute_encoded(contribution, rest)
            return
        num_bytes = self._layout.exchange_bytes
        announced = _announced(contribution, num_bytes, "raw", self._is_out_of_band)
        may_continue = rest is None and self._partial and self.transport.segment is None and self.transfer.lies_here
        if may_continue and self._continue(announced, list(self.transfer.gather(kind)[0].pieces), self.transport.raw):
            return
        if rest is None and not self._is_out_of_band and num_bytes <= INLINE_BYTES:
            self._send([frame(announced, 0, self.transfer.gather(kind, None)[0].pieces)])
        else:
            self._send([frame(announced)])
            self._send_tensors(kind, rest)

    def _contribute_encoded(self, contribution: Contribution, rest: list[int] | None) -> None:
        kind, announced = contribution.kind, _announced(contribution, self.num_bytes, self.encoding.codec.name)
        if rest is not None:
            self._send([frame(announced)])
            self._send_tensors(kind, rest)
            self.encoding.completed()
            return
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
        """Send the rest of a partial transfer. Returns False if there is none; then nothing was sent."""
        payload = announced.contribution.payload
        begin = pb.Begin(num_bytes=payload.num_bytes, codec=payload.codec, in_shared_memory=payload.in_shared_memory)
        rest = self._partial.rest(begin, announced.contribution.seq, pieces)
        if rest is None:
            return False
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

    @property
    def _is_out_of_band(self) -> bool:
        is_large = self._layout.exchange_bytes > INLINE_BYTES
        return self.transport.segment is not None or (self.transport.is_beside_stream and is_large)


def _announced(contribution: Contribution, num_bytes: int, codec: str, is_outside: bool = False) -> pb.WorkerMessage:
    """The message that announces a payload of `num_bytes`."""
    payload = PayloadInfo(codec, num_bytes, is_outside, contribution.payload.without_gradient)
    return contribution_message(changed(contribution, payload=payload))
