"""A socket beside the stream: payloads travel raw, from and to the memory they belong to."""

from __future__ import annotations

from ....common.codecs.base import Codec
from ....common.wire.direct import placed_messages
from ....common.wire.frames import frame, left_out_frame
from ...tensors.replies.publication import Publication, cut
from .grpc import Header, Transport


class DirectTransport(Transport):
    """The stream's messages go over the socket already; its payloads follow the messages that place them."""

    name = "direct"
    as_frames = False

    def carries(self, codec: Codec) -> bool:
        return codec.is_identity

    async def fetch(self, target: memoryview) -> None:
        await self.stream.receive_into(target)

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        stream = self.stream
        try:
            await stream.write(frame(header(publication.version, num_bytes, None)))
            async for start, end in publication.progress():
                for at, to, is_left_out in cut(start, end, self.left_out):
                    if is_left_out:
                        await stream.write(left_out_frame(at, to - at))
                        continue
                    for message in placed_messages([publication.segment.bytes[at:to]], at):
                        await stream.write_payload(message)
            await stream.flush()
        finally:
            self.engine.model.publisher.release(publication, as_frames=False)
