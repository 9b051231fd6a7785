"""Memory that server and worker both map: only the whereabouts of a payload are on the stream."""

from __future__ import annotations

import contextlib

from ....common.codecs.base import Codec
from ....common.reporting.log import get_logger
from ....common.tensors.layout import Layout
from ....common.wire.frames import frame, left_out_frame, payload_frames
from ....common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ....proto import parameter_server_pb2 as pb
from ...tensors.replies.publication import Publication, cut
from ...tensors.staging import Payload
from .grpc import Header, Transport

log = get_logger()

_PROBE_BYTES = 4096


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
        """The transport of a worker that offers a segment; `known` where it cannot be, and why. The worker is told."""
        verdict, transport = pb.SharedMemory(accepted=True), known
        try:
            if self._segment is None:
                raise SegmentError("the server shares no memory (server.shared_memory)")
            if offered.num_bytes < layout.exchange_bytes:
                raise SegmentError(f"{offered.num_bytes} bytes, a contribution has {layout.exchange_bytes}")
            transport = SharedTransport(known.engine, known.stream)
            transport.segment = open_segment(offered)
        except SegmentError as error:
            verdict, transport = pb.SharedMemory(accepted=False, reason=str(error)), known
            log.info("not_shared", rank=known.stream.rank, reason=verdict.reason)
        await known.stream.say(pb.ServerMessage(shared_memory=verdict))
        return transport, f"{SharedTransport.name}: {verdict.reason}" if verdict.reason else ""


class SharedTransport(Transport):
    """A contribution lies in the worker's `segment`, and the weights' own memory is the payload of a reply."""

    name = "shared memory"
    as_frames = False
    segment: Segment

    def carries(self, codec: Codec) -> bool:
        return codec.is_identity

    def memory(self, num_bytes: int) -> Payload | None:
        return self.segment.payload[:num_bytes]

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        """The worker is told what of the weights is made."""
        self.reading = publication
        stream, address = self.stream, publication.segment.address
        await stream.write(frame(header(publication.version, num_bytes, address)))
        async for start, end in publication.progress():
            for at, to, is_left_out in cut(start, end, self.left_out):
                if is_left_out:
                    await stream.write(left_out_frame(at, to - at))
                elif address is not None:
                    await stream.write_placed(at, to)
                else:  # no more shared memory could be had
                    for raw in payload_frames([publication.segment.bytes[at:to]], offset=at):
                        await stream.write(raw)
        if address is None:
            self.taken()  # it was told of no segment, and says nothing
        else:
            stream.lend()
