"""One worker's stream on the server: whole frames in and out, bytes counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from ..common.errors import Reason, refusal
from ..common.wire import BodyReader, Frame, parse
from ..proto import parameter_server_pb2 as pb


class StreamLost(Exception):
    """The worker's end of the stream is gone."""


class Stream:
    """One worker's stream: whole messages in and out, bytes counted."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._writing: asyncio.Future[None] | None = None
        self.num_received = 0
        self.num_sent = 0

    async def read(self, *kinds: str) -> Frame | None:
        """The next frame, which must be one of `kinds` ("" is a bare piece of a body); None at the end."""
        raw = await self._context.read()
        if raw is grpc.aio.EOF:
            return None
        self.num_received += len(raw)
        received = parse(pb.WorkerMessage, raw)
        if (received.kind or "") not in kinds:
            expected = " or ".join(kind or "a piece of a body" for kind in kinds)
            raise refusal(Reason.BAD_REQUEST, f"got {received.kind or 'a piece of a body'}, expected {expected}")
        return received

    async def read_body(self, first: Frame, num_bytes: int, write: Callable[[int, memoryview], None]) -> bool:
        """The body announced by `first`; False when the stream ended before it was whole."""
        reader = BodyReader(num_bytes, write)
        reader.feed(first)
        while not reader.is_complete:
            piece = await self.read("")
            if piece is None:
                return False
            reader.feed(piece)
        return True

    async def write(self, raw: bytes) -> None:
        """Send a message. Returns when the one before it has been taken by the connection, so that the
        next read, or the making of the next message, does not wait for this one."""
        self.num_sent += len(raw)
        await self.flush()
        self._writing = asyncio.ensure_future(self._context.write(raw))

    async def flush(self) -> None:
        """Wait until everything written has been taken by the connection."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                await writing
            except Exception as error:  # gRPC raises several kinds, all meaning that the peer is gone
                raise StreamLost from error

    def abandon(self) -> None:
        """Nobody waits for the last message any more."""
        if self._writing is not None:
            self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())
