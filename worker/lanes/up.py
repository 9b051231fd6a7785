"""Contributions on their way to one shard: encoded once, and the same bytes until it has answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...common.codecs.base import Codec, Coder, Spares, begin_body
from ...common.tensors.layout import as_bytes
from ...common.wire.direct import Placed
from ...common.wire.frames import INLINE_BYTES, frame
from ...proto import parameter_server_pb2 as pb
from ..tensors.staged import Transfer
from ..tensors.transfer import ModelTensors, Source, copy_bytes
from .base import Lane

COUNTED = (pb.Answer.APPLIED, pb.Answer.REPEATED)

# Makes the message that announces the body of a contribution: of its bytes, their codec, whether they are in a segment.
Announce = Callable[[int, str, bool], pb.WorkerMessage]


class Up:
    """One shard's part of this worker's contributions, in `codec`, whose memory is here. `send` gives messages to the
    stream; `lane` says where the bytes of bodies go while it lasts."""

    lane: Lane

    def __init__(
        self, codec: Codec, model: ModelTensors, transfer: Transfer, send: Callable[[Iterable[bytes | Placed]], None]
    ) -> None:
        self.codec = codec
        self._layout, self._num_exchanged = model.layout, model.num_exchanged
        self.transfer = transfer
        self._send = send
        self._encoder: Coder = codec.encoder(model.layout)
        self._encoded: list[memoryview] | None = None  # of the contribution that has not been answered
        self._bodies = Spares()  # as they were gathered
        self._spares = Spares()  # as they are sent; given back when the next one is encoded
        self._last: torch.Tensor | None = None
        self.departed: set[int] = set()  # tensors whose gradients were sent ahead

    def joined(self, lane: Lane) -> None:
        """A new stream: what was sent on the old one may be lost."""
        self.lane = lane
        self.departed.clear()

    def answered(self, outcome: pb.Answer.Outcome) -> None:
        """What became of the contribution: the server's decoder does the same."""
        self._encoded = None
        if outcome in COUNTED:
            self._encoder.commit()
        elif outcome == pb.Answer.START:  # whatever was before, the server has forgotten it
            self._encoder = self.codec.encoder(self._layout)
        else:
            self._encoder.rollback()

    # ---- ahead of the contribution ----------------------------------------------------------------

    def prepare(self, indices: list[int]) -> bool:
        """Begin to copy these gradients off their device, if they are on one; True when that has begun."""
        return self.transfer.prepare(indices, self.lane.segment)

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors ahead of the contribution they belong to; only in raw."""
        if not self.departed:
            self._begin()
        self.departed.update(indices)
        self._send_tensors("gradient", indices)

    def recall(self) -> None:
        """What has departed is not what is to be contributed."""
        if self.departed:
            self.departed.clear()
            self._begin()

    def _begin(self) -> None:
        begin = pb.Begin(body_bytes=self._layout.exchange_bytes, codec="raw", in_segment=self._is_placed)
        self._send([frame(pb.WorkerMessage(begin=begin))])

    # ---- the contribution -------------------------------------------------------------------------

    def contribute(self, announce: Announce, source: Source) -> None:
        """Send it; one that was not answered before is sent again as it was."""
        if not self.codec.is_identity:
            self._send_encoded(announce, self._encode(source))
            return
        rest: list[int] | None = None
        if self.departed:
            rest = [index for index in range(self._num_exchanged) if index not in self.departed]
            self.departed.clear()
        announced = announce(self._layout.exchange_bytes, "raw", self._is_placed)
        if rest is None and not self._is_placed and self._layout.exchange_bytes <= INLINE_BYTES:
            self._send([frame(announced, 0, self.transfer.gather(source, None)[0].pieces)])
        else:
            self._send([frame(announced)])
            self._send_tensors(source, rest)

    def _send_encoded(self, announce: Announce, pieces: list[memoryview]) -> None:
        num_bytes = sum(map(len, pieces))
        is_small = num_bytes <= INLINE_BYTES
        self._send([frame(announce(num_bytes, self.codec.name, False), 0, pieces if is_small else [])])
        for frames in self.lane.messages([] if is_small else pieces):
            self._send(frames)

    def _send_tensors(self, source: Source, indices: list[int] | None) -> None:
        for frames in self.lane.send(self.transfer, source, indices):
            self._send(frames)

    @property
    def _is_placed(self) -> bool:
        is_small = self._layout.exchange_bytes <= INLINE_BYTES
        return self.lane.segment is not None or (self.lane.is_placed and not is_small)

    def _encode(self, source: Source) -> list[memoryview]:
        if self._encoded is None:
            (stretch,) = self.transfer.gather(source, None)
            body, at = self._bodies.lend(self._layout.exchange_bytes), 0
            for piece in stretch.pieces:
                copy_bytes(as_bytes(body[at : at + len(piece)]), piece)
                at += len(piece)
            if self._last is not None:
                self._spares.give_back(self._last)
            self._last = begin_body(self.codec, self._encoder, self._layout, body, self._spares)
            self._encoded = [as_bytes(self._last)]
            self._bodies.give_back(body)
        return self._encoded
