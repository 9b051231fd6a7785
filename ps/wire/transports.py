"""Transports of payloads from and to one worker, for the time of one stream.

Payloads travel in the stream's messages, behind the messages of a direct connection, or in memory that both processes
map. A contribution outside of messages has `in_shared_memory`, and each of its pieces is a message with `out_of_band`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import ClassVar

from ...common.codecs.base import Codec
from ...common.wire.direct import OutOfBand, out_of_band_messages
from ...common.wire.frames import frame, left_out_frame, out_of_band_frame, payload_frames
from ...common.wire.segments import Segment
from ...proto import parameter_server_pb2 as pb
from ..tensors.model import Model
from ..tensors.replies.publication import Publication, Range, cut
from ..tensors.staging import Payload
from .stream import Stream

# Makes the message that announces a payload: of its version, its size, and its segment, if it has one.
Header = Callable[[int, int, pb.Segment | None], pb.ServerMessage]


class Transport:
    """Sends payloads in the stream's messages. All workers share the frames of a version."""

    name: ClassVar[str] = "grpc"  # as logs and the summary show it
    as_frames: ClassVar[bool] = True  # False: reads the weights' memory instead of shared frames

    def __init__(self, model: Model, stream: Stream) -> None:
        self.model = model
        self.stream = stream
        self.reading: Publication | None = None  # in shared memory, until the worker sends Taken
        self.left_out: Sequence[Range] = ()  # bytes of the next weights that the worker already has

    def carries(self, codec: Codec) -> bool:
        """Whether a contribution with this codec may travel outside of messages."""
        return False

    def memory(self, num_bytes: int) -> Payload | None:
        """Return the shared memory of a contribution of `num_bytes`, or None to use the server's memory."""
        return None

    async def fetch(self, target: memoryview) -> AsyncIterator[int]:
        """Receive an out-of-band piece into `target`. Yields the number of bytes of each part that has arrived."""
        yield len(target)

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        """Send the weights of one publication, and release it."""
        try:
            await self.stream.write(frame(header(publication.version, num_bytes, None)))
            async for message in self._messages(publication):
                await self.stream.write(message)
            await self.stream.flush()
        finally:
            self._release(publication)

    async def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        """Yield the messages of a payload as soon as its weights are finished."""
        async for raw in publication.frames(self.left_out):
            yield raw

    def _release(self, publication: Publication) -> None:
        self.model.publisher.release(publication, as_frames=self.as_frames)

    def taken(self) -> None:
        """Release the weights in shared memory, because the worker has read them or is gone."""
        publication, self.reading = self.reading, None
        if publication is not None:
            self._release(publication)


class DirectTransport(Transport):
    """Sends raw payloads behind their messages, on the direct connection that carries all messages."""

    name = "direct"
    as_frames = False

    def carries(self, codec: Codec) -> bool:
        return codec.is_identity

    def fetch(self, target: memoryview) -> AsyncIterator[int]:
        return self.stream.receive_into(target)

    async def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        async for made in publication.progress():
            for start, end, is_left_out in cut(*made, self.left_out):
                if is_left_out:
                    yield left_out_frame(start, end - start)
                else:
                    for message in self._pieces(publication, start, end):
                        yield message

    def _pieces(self, publication: Publication, start: int, end: int) -> Iterable[bytes | OutOfBand]:
        """Return the messages of these bytes."""
        return out_of_band_messages([publication.segment.bytes[start:end]], start)


class SharedTransport(DirectTransport):
    """Uses shared memory: the worker's `segment` for contributions, and the weights' own memory for replies."""

    name = "shared memory"

    def __init__(self, model: Model, stream: Stream, segment: Segment) -> None:
        super().__init__(model, stream)
        self.segment = segment

    fetch = Transport.fetch

    def memory(self, num_bytes: int) -> Payload | None:
        return self.segment.payload[:num_bytes]

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        """Announce the bytes of the weights as they are finished. The worker sends Taken once it has read them."""
        self.reading = publication
        stream, address = self.stream, publication.segment.address
        await stream.write(frame(header(publication.version, num_bytes, address)))
        async for message in self._messages(publication):
            await stream.write(message)
        if address is None:
            self.taken()  # without a segment, the worker sends no Taken
        else:
            stream.expect_taken()

    def _pieces(self, publication: Publication, start: int, end: int) -> Iterable[bytes | OutOfBand]:
        if publication.segment.address is None:  # there was no shared memory for this version
            return payload_frames([publication.segment.bytes[start:end]], offset=start)
        self.stream.count_out_of_band(end - start)
        return [out_of_band_frame(start, end - start)]
