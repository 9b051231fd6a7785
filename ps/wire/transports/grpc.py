"""The transport that is always there, the stream itself; and what others have in common with it.

A transport is where payloads go to and from one worker, while its stream lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from ....common.codecs.base import Codec
from ....common.wire.frames import frame
from ....proto import parameter_server_pb2 as pb
from ...engine.engine import Engine
from ...tensors.replies.publication import Publication, Range
from ...tensors.staging import Payload
from ..stream import Stream


class Header(Protocol):
    """Makes the message that announces a payload: its version, its size, and where it lies."""

    def __call__(self, version: int, num_bytes: int, segment: pb.Segment | None) -> pb.ServerMessage: ...


class Transport:
    """Payloads are in the stream's messages. Another transport says what it does otherwise: a contribution that comes
    by it is
    announced with `in_segment`, and each piece of one is a message that calls it `placed`."""

    name: ClassVar[str] = "grpc"  # as people see it
    as_frames: ClassVar[bool] = True  # replies are frames that all workers share; False: the weights' memory is read

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self.engine = engine
        self.stream = stream
        self.reading: Publication | None = None  # of which the worker has still to say that it is taken
        self.left_out: Sequence[Range] = ()  # what the worker has of the weights that are sent next: it need not travel

    def carries(self, codec: Codec) -> bool:
        """Whether a contribution with this codec may come otherwise than in messages."""
        return False

    def memory(self, num_bytes: int) -> Payload | None:
        """Where one of `num_bytes` comes to lie by itself; None: in the server's staging memory."""
        return None

    async def fetch(self, target: memoryview) -> None:
        """A piece was called placed: returns when it lies in `target`."""

    async def send(self, header: Header, publication: Publication, num_bytes: int) -> None:
        """Weights of one version, which is given back when it has left, or was read. Here: everybody's frames, as they
        are made."""
        try:
            await self.stream.write(frame(header(publication.version, num_bytes, None)))
            async for raw in publication.frames(self.left_out):
                await self.stream.write(raw)
        finally:
            self.engine.model.publisher.release(publication, as_frames=True)

    def taken(self) -> None:
        """The worker has read what it was told of, or is gone."""
        publication, self.reading = self.reading, None
        if publication is not None:
            self.engine.model.publisher.release(publication, as_frames=False)
