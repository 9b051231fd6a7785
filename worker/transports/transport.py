"""Transports: how the bytes of payloads travel between this worker and one shard during one stream.

The plain transport always works: pieces of a payload are messages on the stream. `direct` uses a socket beside the
stream, and `shared` uses memory that worker and server both map. The conversation is the same. A worker takes the first
transport of its preference that both sides can open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import torch

from ...common.config.schema import WorkerConfig
from ...common.errors import bad_request
from ...common.kinds import ContributionKind
from ...common.wire.direct import OutOfBand, out_of_band_messages
from ...common.wire.frames import INLINE_BYTES, left_out_frame, out_of_band_frame, payload_frames, without_zeros
from ...common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ...proto import parameter_server_pb2 as pb
from ..tensors.transfer import DirectTransfer, Indices

Messages = Iterable[bytes | OutOfBand]
Pieces = Iterable[memoryview]
Carry = Callable[[Pieces, int], Messages]

# One more than the versions that a server has on their way at once by default.
_MAX_OPEN = 8


class Transport:
    """The plain transport: pieces of a payload are messages. `reason` is a sentence: why it is not open."""

    name: ClassVar[str] = "grpc"  # shown to people
    is_beside_stream: ClassVar[bool] = False  # payloads of more than INLINE_BYTES are announced as in shared memory
    is_open = True
    reason = ""
    segment: torch.Tensor | None = None  # uint8 [exchange_bytes], for contributions
    _may_leave_out = False  # whether zeros may be left out

    # ---- agreed on once on every stream -------------------------------------------------------

    def joined(self, welcome: pb.Welcome, why_not_direct: str = "") -> None:
        """A new stream is open. Nothing of an earlier stream is used any more.

        `why_not_direct`: a phrase with the reason; empty if there is a direct connection.
        """
        self._may_leave_out = welcome.takes_left_out

    # ---- payloads -----------------------------------------------------------------------------

    def send(self, transfer: DirectTransfer, kind: ContributionKind, indices: Indices) -> Iterator[Messages]:
        """Gather these tensors of a contribution (None: all). Yields their messages as soon as they may be sent."""
        for stretch in transfer.stream(kind, indices):
            yield from self.raw(stretch.pieces, stretch.offset)

    def raw(self, pieces: Pieces, offset: int) -> Iterator[Messages]:
        """Messages for the pieces of a raw payload from `offset` on."""
        return self.messages(pieces, offset)

    def messages(self, pieces: Pieces, offset: int = 0, carry: Carry = payload_frames) -> Iterator[Messages]:
        """Messages, made by `carry`, for the pieces of a payload from `offset` on.

        Zeros are left out if the server supports it: parts of other optimizers, and tensors that the loss does not
        reach.
        """
        if not self._may_leave_out:
            yield carry(pieces, offset)
            return
        for at, parts, num_zeros in without_zeros(pieces, offset):
            yield carry(parts, at) if parts else [left_out_frame(at, num_zeros)]

    def memory(self, address: pb.Segment) -> memoryview:
        """The memory that has a reply's weights. Raises SegmentError."""
        raise bad_request("the server sends weights in shared memory, which was not agreed on")


class DirectTransport(Transport):
    """A socket beside the stream that carries payloads without copies. Open if there is a direct connection."""

    name = "direct"
    is_beside_stream = True
    is_open = False

    def joined(self, welcome: pb.Welcome, why_not_direct: str = "") -> None:
        super().joined(welcome)
        self.is_open, self.reason = not why_not_direct, why_not_direct

    def raw(self, pieces: Pieces, offset: int) -> Iterator[Messages]:
        return self.messages(pieces, offset, lambda *payload: list(out_of_band_messages(*payload)))


class SharedTransport(Transport):
    """Memory that both sides map; the stream carries only positions.

    The worker's segment holds contributions. The server's segments hold the weights of replies.
    """

    name = "shared memory"
    is_open = False
    _may_offer = False
    _is_broken = False  # a segment of the server could not be opened
    _offered: Segment | None = None

    def __init__(self) -> None:
        self._mapped: dict[str, Segment] = {}

    def joined(self, welcome: pb.Welcome, why_not_direct: str = "") -> None:
        # A segment of an earlier stream is not reused, because the server may still read a contribution from it.
        self.is_open, self.segment, self._offered, self._may_offer = False, None, None, False
        self._mapped.clear()
        if self._is_broken:
            return
        if not welcome.HasField("probe"):
            self.reason = "the server shares no memory"
            return
        try:
            open_segment(welcome.probe)
            self._may_offer = True
        except SegmentError as error:
            self.reason = str(error)

    def offer(self, model: pb.Model, num_bytes: int) -> bool:
        """Write a segment for contributions of `num_bytes` into `model`. Returns whether the server will reply."""
        if self._may_offer and num_bytes > INLINE_BYTES:
            try:
                self._offered = new_segment(num_bytes)
            except SegmentError as error:
                self.reason = str(error)
        if self._offered is None or self._offered.address is None:
            return False
        model.segment.CopyFrom(self._offered.address)
        return True

    def decided(self, verdict: pb.SharedMemory) -> None:
        """The server's reply to the offer."""
        assert self._offered is not None
        self.is_open = verdict.accepted
        if verdict.accepted:
            self.segment = self._offered.payload
        else:
            self.reason, self._offered = verdict.reason, None

    def send(self, transfer: DirectTransfer, kind: ContributionKind, indices: Indices) -> Iterator[Iterable[bytes]]:
        assert self.segment is not None
        for start, end in transfer.gather_into(kind, self.segment, indices):
            yield [out_of_band_frame(start, end - start)]

    def memory(self, address: pb.Segment) -> memoryview:
        """After an error, this transport stays closed."""
        segment = self._mapped.get(address.label)
        if segment is None:
            try:
                segment = open_segment(address)
            except SegmentError as error:
                self._is_broken, self.reason = True, str(error)
                raise
            while len(self._mapped) >= _MAX_OPEN:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[address.label] = segment
        return segment.bytes


class Transports:
    """The transports that a worker may use, ordered by preference. `transport` is the one in use."""

    def __init__(self, config: WorkerConfig) -> None:
        by_name = {"shared": SharedTransport(), "direct": DirectTransport(), "grpc": Transport()}
        wanted = list(config.wanted_transports)
        self.wants_direct = "direct" in wanted
        self._off: list[str] = []  # why a transport is not tried
        codecs = [name for name in (config.codec, config.reply_codec) if name != "raw"]
        if codecs and "shared" in wanted:  # a codec changes the result, so it is kept
            wanted.remove("shared")
            self._off = [f"{SharedTransport.name}: off (worker.codec is {codecs[0]})"]
        self._all: list[Transport] = [by_name[name] for name in wanted]
        self.transport = self._all[-1]

    def joined(self, welcome: pb.Welcome, why_not_direct: str) -> None:
        """A new stream is open. `why_not_direct` is empty if there is a direct connection."""
        for transport in self._all:
            transport.joined(welcome, why_not_direct)
        self.agreed()

    def offer(self, model: pb.Model, num_bytes: int) -> SharedTransport | None:
        """Let shared memory write its offer into `model`. The server replies to it.

        Returns None if a better transport is open, or there is no offer.
        """
        for transport in self._all[: self._all.index(self.transport)]:
            if isinstance(transport, SharedTransport) and transport.offer(model, num_bytes):
                self.transport = transport
                return transport
        return None

    def agreed(self) -> None:
        """Choose the transport after the negotiation on this stream."""
        self.transport = next(transport for transport in self._all if transport.is_open)

    @property
    def reason(self) -> str:
        """Why better transports are not in use, as `transport: reason`; empty if the best one is."""
        better = self._all[: self._all.index(self.transport)]
        return "; ".join([*self._off, *(f"{item.name}: {item.reason}" for item in better if item.reason)])
