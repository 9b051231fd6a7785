"""Memory that server and worker both map: only the whereabouts of a body are on the stream."""

from __future__ import annotations

import contextlib

from ....common.reporting.log import get_logger
from ....common.tensors.layout import Layout
from ....common.wire.frames import body_frames, frame
from ....common.wire.protocol import segment_from_proto, segment_to_proto
from ....common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ....proto import parameter_server_pb2 as pb
from ...engine.engine import Engine
from ...engine.peers import Peer
from ...tensors.publication import Publication
from ..stream import Stream
from .base import Header

log = get_logger()

_PROBE_BYTES = 4096


class SharedMemory:
    """What the server offers workers of its host, and takes from them; nothing unless `is_wanted`."""

    def __init__(self, is_wanted: bool) -> None:
        self._probe: Segment | None = None
        if is_wanted:
            with contextlib.suppress(SegmentError):
                self._probe = new_segment(_PROBE_BYTES)

    @property
    def probe(self) -> pb.Segment | None:
        """By which a worker finds out whether it is on this host."""
        return segment_to_proto(self._probe.address if self._probe is not None else None)

    async def open(self, stream: Stream, peer: Peer, layout: Layout, offered: pb.Segment) -> None:
        """Try to open the worker's segment, and say how it went."""
        reason, peer.traffic.lane = "", "tcp"
        try:
            if self._probe is None:
                raise SegmentError("the server shares no memory (server.shared_memory)")
            if offered.num_bytes < layout.exchange_bytes:
                raise SegmentError(f"{offered.num_bytes} bytes, a contribution has {layout.exchange_bytes}")
            peer.segment = open_segment(segment_from_proto(offered))
            peer.traffic.lane = "shared memory"
        except SegmentError as error:
            reason = str(error)
            log.info("not_shared", rank=peer.rank, reason=reason)
        verdict = pb.SharedMemory(accepted=peer.segment is not None, reason=reason)
        await stream.write(frame(pb.ServerMessage(shared_memory=verdict)))


async def place(engine: Engine, stream: Stream, peer: Peer, header: Header, publication: Publication) -> None:
    """The weights' own memory is the body: the worker, on this host, is told what of it is made."""
    peer.reading = publication
    address = publication.segment.address
    await stream.write(frame(header(publication.version, publication.num_bytes, address)))
    async for start, end in publication.progress():
        if address is not None:
            await stream.write_placed(start, end)
        else:  # no more shared memory could be had
            for raw in body_frames([publication.segment.bytes[start:end]], offset=start):
                await stream.write(raw)
    if address is None:
        taken(engine, peer)  # it was told of no segment, and says nothing
    else:
        stream.lend()


def taken(engine: Engine, peer: Peer) -> None:
    """The worker has read what it was told of, or is gone."""
    publication, peer.reading = peer.reading, None
    if publication is not None:
        engine.model.publisher.release(publication, as_frames=False)
