"""The ways of payloads to and from one worker while its stream lasts: in the stream's messages, behind the messages of
a direct connection, or in memory that both processes map.

A contribution that comes otherwise than in messages is announced with `in_segment`, and each piece of it is a message
that says `out_of_band`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Protocol

from ...common.codecs.base import Codec
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.wire.direct import OutOfBand, out_of_band_messages
from ...common.wire.frames import frame, left_out_frame, payload_frames
from ...common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ...proto import parameter_server_pb2 as pb
from ..tensors.model import Model
from ..tensors.replies.publication import Publication, Range, cut
from ..tensors.staging import Payload
from .stream import Stream

log = get_logger()

_PROBE_BYTES = 4096


class Header(Protocol):
    """Makes the message that announces a payload: its version, its size, and where it lies."""

    def __call__(self, version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage: ...


class Transport:
    """Payloads travel in the stream's messages. The frames of a version are shared by all workers."""

    name: ClassVar[str] = "grpc"  # for people
    as_frames: ClassVar[bool] = True  # False: the weights' memory is read, not the shared frames

    def __init__(self, model: Model, stream: Stream) -> None:
        self.model = model
        self.stream = stream
        self.reading: Publication | None = None  # that the worker has not said to have taken
        self.left_out: Sequence[Range] = ()  # bytes of the next weights that the worker has already

    def carries(self, codec: Codec) -> bool:
        """Whether a contribution with this codec may come otherwise than in messages."""
        return False

    def memory(self, num_bytes: int) -> Payload | None:
        """Where a contribution of `num_bytes` lies once its worker has sent it; None: in the server's memory."""
        return None

    async def fetch(self, target: memoryview) -> None:
        """Receive a piece that was placed; returns when it lies in `target`."""

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        """Send the weights of one version, which is given back once they have left."""
        try:
            await self.stream.write(frame(header(publication.version, num_bytes, None)))
            async for message in self._messages(publication):
                await self.stream.write(message)
            await self.stream.flush()
        finally:
            self._release(publication)

    async def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        """The messages of a payload, as the weights are made."""
        async for raw in publication.frames(self.left_out):
            yield raw

    def _release(self, publication: Publication) -> None:
        self.model.publisher.release(publication, as_frames=self.as_frames)

    def taken(self) -> None:
        """The worker has read the weights in shared memory, or is gone."""
        publication, self.reading = self.reading, None
        if publication is not None:
            self._release(publication)


class DirectTransport(Transport):
    """Payloads follow the messages that place them, raw, on a connection that carries the stream's messages too."""

    name = "direct"
    as_frames = False

    def carries(self, codec: Codec) -> bool:
        return codec.is_identity

    async def fetch(self, target: memoryview) -> None:
        await self.stream.receive_into(target)

    async def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        async for made in publication.progress():
            for start, end, is_left_out in cut(*made, self.left_out):
                if is_left_out:
                    yield left_out_frame(start, end - start)
                else:
                    for message in out_of_band_messages([publication.segment.bytes[start:end]], start):
                        yield message


class SharedTransport(Transport):
    """A contribution lies in the worker's `segment`. The weights' own memory is the payload of a reply."""

    name = "shared memory"
    as_frames = False

    def __init__(self, model: Model, stream: Stream, segment: Segment) -> None:
        super().__init__(model, stream)
        self.segment = segment

    def carries(self, codec: Codec) -> bool:
        return codec.is_identity

    def memory(self, num_bytes: int) -> Payload | None:
        return self.segment.payload[:num_bytes]

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        """Tell the worker which bytes of the weights are made; it says Taken when it has read them."""
        self.reading = publication
        stream, address = self.stream, publication.segment.address
        await stream.write(frame(header(publication.version, num_bytes, address)))
        async for made in publication.progress():
            for start, end, is_left_out in cut(*made, self.left_out):
                if is_left_out:
                    await stream.write(left_out_frame(start, end - start))
                elif address is not None:
                    await stream.write_out_of_band(start, end)
                else:  # no more shared memory could be had
                    for raw in payload_frames([publication.segment.bytes[start:end]], offset=start):
                        await stream.write(raw)
        if address is None:
            self.taken()  # the worker knows of no segment, and says nothing
        else:
            stream.lend()


class Probe:
    """A small segment by which a worker finds out whether it is on this host; none unless `is_wanted`."""

    def __init__(self, is_wanted: bool) -> None:
        self._segment: Segment | None = None
        if is_wanted:
            with contextlib.suppress(SegmentError):
                self._segment = new_segment(_PROBE_BYTES)

    @property
    def shown(self) -> pb.Segment | None:
        return self._segment.address if self._segment is not None else None

    async def open(self, known: Transport, layout: Layout, offered: pb.Segment) -> tuple[Transport, str]:
        """The transport of a worker that offers a segment, or `known` and the reason. The worker is told."""
        transport, reason = known, ""
        try:
            if self._segment is None:
                raise SegmentError("the server shares no memory (server.shared_memory)")
            if offered.num_bytes < layout.exchange_bytes:
                raise SegmentError(f"{offered.num_bytes} bytes, a contribution has {layout.exchange_bytes}")
            transport = SharedTransport(known.model, known.stream, open_segment(offered))
        except SegmentError as error:
            reason = str(error)
            log.info("not_shared", rank=known.stream.rank, reason=reason)
        verdict = pb.SharedMemory(accepted=not reason, reason=reason)
        await known.stream.say(pb.ServerMessage(shared_memory=verdict))
        return transport, f"{SharedTransport.name}: {reason}" if reason else ""
