"""Transports of payloads from and to one worker, for the time of one stream.

Payloads travel in the stream's messages, behind the messages of a direct connection, or in memory that both processes
map. A contribution outside of messages has `in_shared_memory`, and each of its pieces is a message with `out_of_band`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import ClassVar

from ...common.wire.direct import OutOfBand, out_of_band_messages
from ...common.wire.frames import left_out_frame, out_of_band_frame, payload_frames
from ...common.wire.messages import write_weights
from ...common.wire.records import WeightsInfo
from ...common.wire.segments import Segment
from ...proto import parameter_server_pb2 as pb
from ..tensors.model import Model
from ..tensors.replies import Publication, Range, cut
from .stream import Stream


def announce(message: pb.ServerMessage, version: int, weights: WeightsInfo) -> pb.ServerMessage:
    """Write into a Reply or Final which weights follow it, and return it."""
    if message.HasField("final"):
        message.final.version = version
        write_weights(weights, message.final.weights)
    else:
        message.reply.result.version = version
        write_weights(weights, message.reply.weights)
    return message


class Transport:
    """Sends payloads in the stream's messages. All workers share the frames of a version."""

    name: ClassVar[str] = "grpc"  # as logs and the summary show it
    # All payloads are frames. False: raw contributions may be out of band, and replies read the weights' own memory.
    as_frames: ClassVar[bool] = True

    def __init__(self, model: Model, stream: Stream, segment: Segment | None = None) -> None:
        self.model, self.stream = model, stream
        self.segment = segment  # the worker's shared memory, for contributions
        self.reading: Publication | None = None  # is being sent; in shared memory, until the worker sends Taken
        self.left_out: Sequence[Range] = ()  # bytes of the next weights that the worker already has

    async def send(self, message: pb.ServerMessage, publication: Publication, num_bytes: int) -> None:
        """Send a Reply or Final with the weights of one publication, as they are finished, and release it.

        In shared memory, the publication is released once the worker has read it and sends Taken.
        """
        self.reading = publication
        address = publication.segment.address if self.segment is not None else None
        try:
            await self.stream.say(announce(message, publication.version, WeightsInfo(num_bytes, segment=address)))
            async for piece in self._messages(publication):
                await self.stream.write(piece)
            if address is None:
                await self.stream.flush()
            else:
                self.stream.expect_taken()
        finally:
            if address is None:
                self.taken()

    def _messages(self, publication: Publication) -> AsyncIterator[bytes | OutOfBand]:
        """Yield the messages of a payload as soon as its weights are finished."""
        return publication.frames(self.left_out)

    def taken(self) -> None:
        """Release the weights, because they are sent, or the worker has read them or is gone."""
        publication, self.reading = self.reading, None
        if publication is not None:
            self.model.publisher.release(publication, self.as_frames)


class DirectTransport(Transport):
    """Sends raw payloads behind their messages, on the direct connection that carries all messages."""

    name = "direct"
    as_frames = False

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
    """Uses shared memory: the worker's `segment` for contributions, and the weights' own memory for replies.

    A reply announces the bytes of the weights as they are finished, and the worker sends Taken once it has read them.
    """

    name = "shared memory"

    def _pieces(self, publication: Publication, start: int, end: int) -> Iterable[bytes | OutOfBand]:
        if publication.segment.address is None:  # there was no shared memory for this version
            return payload_frames([publication.segment.bytes[start:end]], offset=start)
        self.stream.bytes_written += end - start
        return [out_of_band_frame(start, end - start)]
