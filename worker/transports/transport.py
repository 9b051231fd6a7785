"""Transports: how the bytes of payloads travel between this worker and one shard during one stream.

The plain transport always works: pieces of a payload are messages on the stream. `direct` uses a socket beside the
stream, and `shared` uses memory that worker and server both map. The conversation is the same. A worker takes the first
transport of its preference that both sides can open.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import ClassVar

import torch

from ...common.codecs.base import Codec, FreeBuffers, decode_payload, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.codecs.shared.reference import check_sum, follow, moves_reference
from ...common.config.schema import WorkerConfig
from ...common.errors import bad_request
from ...common.kinds import ContributionKind
from ...common.reporting.log import get_logger
from ...common.tensors.layout import as_bytes, new_payload
from ...common.tensors.optimizers import Hyperparameters
from ...common.wire.direct import OutOfBand, out_of_band_messages
from ...common.wire.frames import INLINE_BYTES, frame, left_out_frame, out_of_band_frame, payload_frames, without_zeros
from ...common.wire.messages import contribution_message
from ...common.wire.records import COUNTED, Contribution, Outcome, PayloadInfo, ReferenceInfo, WeightsInfo
from ...common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ...proto import parameter_server_pb2 as pb
from ..tensors.transfer import DirectTransfer, Indices, ModelTensors, copy_bytes
from .encoding import Encoding

log = get_logger()

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


# ---- up ------------------------------------------------------------------------------------------
# Contributions on their way to one shard.


CarryStretches = Callable[[list[memoryview], int], Iterator[Messages]]


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

    def contribute(self, contribution: Contribution, hyperparameters: Sequence[Hyperparameters] | None = None) -> None:
        """Send a contribution, with the `hyperparameters` that this shard does not know yet (None: all).

        Without a reply, the same bytes are sent again, or only the missing ones.
        """
        self._kind = kind = contribution.kind
        if not kind.has_payload:
            self._send([frame(contribution_message(contribution, None, hyperparameters))])
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
        announced = contribution_message(contribution, payload, hyperparameters)
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

    def _continue(self, announced: pb.WorkerMessage, pieces: list[memoryview], carry: CarryStretches) -> bool:
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


# ---- down ----------------------------------------------------------------------------------------
# Receives weights from one shard: raw ones piece by piece, encoded ones when they are complete.


Write = Callable[[int, memoryview], None]
# `receive(write)` passes each piece of the announced payload to `write`, and returns after the last one.
Receive = Callable[[Write], None]


class Down:
    """Receives one shard's part of the weights.

    Replies may be differences to the server's reference. This worker's copy of it is separate from the model, so local
    steps and evaluations do not change it. `reference` is the number of the copy; 0: it is not complete.
    """

    def __init__(self, codec: Codec, model: ModelTensors, transfer: DirectTransfer) -> None:
        self.codec, self.transfer = codec, transfer
        self._layout, self._names_at = model.layout, model.names_at
        self._moves_reference = moves_reference(codec)
        self.reference = 0
        self._copy: torch.Tensor | None = None  # uint8 [exchange_bytes]
        self._encoded, self._payloads = FreeBuffers(), FreeBuffers()

    def take(self, weights: WeightsInfo, receive: Receive, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Receive weights. On return the model has them, and the server may rely on that.

        After an error the weights count as not received, and may be sent again. Bytes in `kept`, which `receive` fills,
        are not sent because the model has them. With a reference the payload is a reference or leads to one.
        """
        num_bytes, codec, exchange_bytes = weights.num_bytes, weights.codec, self._layout.exchange_bytes
        is_raw, info = codec in ("", "raw"), weights.reference if self._moves_reference else None
        if is_raw:
            if num_bytes not in (exchange_bytes, self._layout.total_bytes) and (num_bytes or info is not None):
                raise _other_bytes(num_bytes, exchange_bytes)
            if info is not None:
                self._take_whole(info, receive)
            else:
                receive(self.transfer.write)
        elif info is None and self._moves_reference:
            message = f"weights in codec '{codec}', which takes differences only, and no reference"
            raise bad_request(message, fix="install the same version of paramserver on both")
        elif codec != self.codec.name:
            found = "weights" if info is None else "differences"
            raise bad_request(f"{found} in codec '{codec}', asked for were '{self.codec.name}'")
        elif info is not None:
            self._take_differences(num_bytes, info, receive)
        else:
            if num_bytes != (expected := payload_bytes(self.codec, self._layout)):
                raise _other_bytes(num_bytes, expected)
            encoded, payload = self._encoded.lend(num_bytes), self._payloads.lend(exchange_bytes)
            receive(_writer(encoded))
            decode_payload(self.codec, self._layout, encoded, payload)
            self.transfer.write(0, as_bytes(payload))
            self._encoded.give_back(encoded)
            self._payloads.give_back(payload)
        if num_bytes or info is not None:
            self.transfer.finish_write(num_bytes if is_raw else exchange_bytes, kept)

    def _take_whole(self, info: ReferenceInfo, receive: Receive) -> None:
        """Receive a complete reference into the copy and the model. After an error it counts as not received."""
        if self._copy is None:
            self._copy = new_payload(self._layout.exchange_bytes)
        self.reference, memory = 0, as_bytes(self._copy)

        def both(offset: int, data: memoryview) -> None:
            mapped = data[: max(0, len(memory) - offset)]  # frozen tensors follow the exchanged ones
            copy_bytes(memory[offset : offset + len(mapped)], mapped)
            self.transfer.write(offset, data)

        receive(both)
        self.reference = info.number

    def _take_differences(self, num_bytes: int, info: ReferenceInfo, receive: Receive) -> None:
        """Receive differences that lead from the copy to a newer reference, and write it into the model."""
        first, payload = self.reference, self._copy
        if payload is None or not 0 < first <= info.number:
            message = f"differences up to reference {info.number}; this worker has reference {first}"
            raise bad_request(message)
        codecs = self._codecs(info, info.number - first)
        sizes = [payload_bytes(codec, self._layout) for codec in codecs]
        if num_bytes != sum(sizes) or num_bytes > max(*sizes, 0, self._layout.exchange_bytes):
            raise _other_bytes(num_bytes, sum(sizes))
        encoded = self._encoded.lend(num_bytes)
        receive(_writer(encoded))
        self.reference = at = 0
        for number, codec, size in zip(range(first + 1, info.number + 1), codecs, sizes, strict=True):
            difference = encoded[at : at + size]
            follow(codec, self._layout, difference.clone() if at else difference, payload)  # the clone is aligned
            at += size
            if number == info.checked and (found := check_sum(self._layout, payload)) != info.crc:
                crcs = f"their CRC-32 is {found:08x}, the server's {info.crc:08x}"
                message = f"this worker's weights of reference {number} are not the server's: {crcs}"
                fix = "start the worker again, which receives them whole; if it happens again, check its memory, or "
                raise bad_request(message, fix=f"{fix}use --set worker.reply_codec=bf16")
        self._encoded.give_back(encoded)
        self.transfer.write(0, as_bytes(payload))
        self.reference = info.number

    def _codecs(self, info: ReferenceInfo, count: int) -> list[ByTensor]:
        """The codec of each difference, for its tensors. Refuses a wrong count and unknown tensors."""
        assert isinstance(self.codec, ByTensor)
        if not info.left_out:
            return [self.codec] * count
        if len(info.left_out) != count:
            raise bad_request(f"{count} differences, but missing tensors are listed for {len(info.left_out)}")
        try:
            return [only_rest(self.codec, self._names_at(positions)) for positions in info.left_out]
        except IndexError:
            raise bad_request("differences without tensors that the model does not have") from None


def _writer(payload: torch.Tensor) -> Write:
    """A function that copies pieces to a buffer, uint8 [n]."""
    memory = as_bytes(payload)
    return lambda offset, data: copy_bytes(memory[offset : offset + len(data)], data)


def _other_bytes(found: int, expected: int) -> Exception:
    message = f"the server sends {found} bytes of weights; this model, or these differences, have {expected}"
    return bad_request(message)
