"""One worker's stream on the server: whole frames in and out, bytes counted, and no peer waited for for ever.

What a peer owes: the bytes it announced, room for what is sent to it, and its word that it has read what
lies in shared memory. For each of them it has `limits.progress_s` without a movement. Waiting for memory, for a
round or for the next contribution is not counted: nothing is owed then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from ...common.config.schema import LimitsConfig
from ...common.errors import ParamServerError, Reason, refusal
from ...common.wire.checks import check_header
from ...common.wire.direct import Placed, on_the_wire
from ...common.wire.frames import CHUNK_BYTES, Frame, PayloadReader, parse, placed_frame
from ...proto import parameter_server_pb2 as pb
from .direct import Connection, is_large
from .limits import Allowance, Pace, Watch

Result = TypeVar("Result")

# A worker begins anew once when it finds that what has left was not its gradient yet.
_MAX_BEGINS = 8
# A peer that does not even take a refusal is dropped.
_SETTLE_S = 0.5
_REFUSING_S = 2.0
_SAY_WAITING_S = 1.0


class StreamLost(Exception):
    """The worker's end of the stream is gone."""


class StreamBroken(Exception):
    """Reading or writing failed, and no connection did: a mistake of ours, which another connection would meet too."""


# What gRPC and sockets raise when the peer is gone.
_GONE = (OSError, grpc.RpcError, grpc.aio.BaseError)


class Stream:
    """One worker's stream, used by one task, which `end` cancels.

    `refused` is the refusal that the call ends with; `is_memory_wanted` says whether others wait for the memory of an
    upload.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        limits: LimitsConfig,
        watch: Watch,
        is_memory_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self._direct: Connection | None = None  # what is said goes over it
        self._writing: asyncio.Future[None] | None = None
        self.rank: int | None = None  # once it has one
        self.num_received = 0
        self.num_sent = self.num_in_waiting = 0
        self.refused: ParamServerError | None = None
        self._time = asyncio.get_running_loop().time
        self._task = asyncio.current_task()
        self._is_memory_wanted = is_memory_wanted
        self._pace = None if limits.upload_bytes_per_s is None else Pace(limits.upload_bytes_per_s)
        self._allowance = Allowance(limits.progress_s, CHUNK_BYTES)
        self._owed = 0  # bytes that were announced and have not come
        self._num_begins = 0  # since the last contribution's facts
        self._reading_since: float | None = None  # while bytes are owed
        self._writing_since = 0.0
        self._lent_since: float | None = None
        self._too_slow_at: float | None = None
        self._watch = watch
        watch.add(self)

    # ---- in -------------------------------------------------------------------------------

    async def read(self, *kinds: str) -> Frame | None:
        """The next frame, which must be one of `kinds` ("" is a bare piece of a payload); None at the end."""
        if self._pace is not None and (wait_s := self._pace.wait_s()):
            await asyncio.sleep(wait_s)
        if self._owed:
            self._reading_since = self._time()
        try:
            raw = await (self._direct or self._context).read()
        except ParamServerError:
            raise
        except Exception as error:
            raise self._meaning_of(error) from error
        if raw is grpc.aio.EOF or raw is None:
            self._owed, self._reading_since = 0, None
            return None
        received = parse(pb.WorkerMessage, raw)
        if self._pace is not None:
            self._pace.came(len(raw))
        self.num_received += len(raw) + received.placed
        if (received.kind or "") not in kinds:
            expected = " or ".join(kind or "a piece of a payload" for kind in kinds)
            raise refusal(Reason.BAD_REQUEST, f"got {received.kind or 'a piece of a payload'}, expected {expected}")
        if received.header is not None:
            self._take_header(received.header)
        if self._owed and received.kind != "rows":
            came = received.placed if self._direct is None else 0
            self._take_piece(len(received.data) + came + received.left_out)
        return received

    @property
    def direct(self) -> Connection | None:
        """Where messages may be read and written at once: nothing keeps this worker's pace."""
        return self._direct if self._pace is None else None

    def go_direct(self, connection: Connection) -> None:
        """Everything from here on is said over this."""
        self._direct = connection

    async def receive_into(self, target: memoryview) -> None:
        """Bytes that follow a message on a direct connection."""
        assert self._direct is not None
        done = 0
        while done < len(target):
            end = len(target)
            if self._pace is not None:
                await asyncio.sleep(self._pace.wait_s())
                end = min(end, done + CHUNK_BYTES)
            self._reading_since = self._time()
            try:
                num_bytes = await self._direct.receive_some(target[done:end])
            except Exception as error:
                raise self._meaning_of(error) from error
            if not num_bytes:
                raise StreamLost
            if self._pace is not None:
                self._pace.came(num_bytes)
            self._take_piece(num_bytes)
            done += num_bytes

    def _meaning_of(self, error: Exception) -> StreamLost | StreamBroken:
        """Of what reading or writing raised."""
        is_gone = isinstance(error, _GONE) or (self._direct is not None and self._direct.is_closed)
        return StreamLost() if is_gone else StreamBroken()

    async def read_within(self, timeout_s: float, *kinds: str) -> Frame | None:
        """The next message of a worker that has not been let in yet, or that others wait for."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.read(*kinds)
        except TimeoutError:
            name = kinds[0].replace("_", " ").capitalize()
            what = f"no {name} within {timeout_s:g} s (server.join_timeout_s)"
            raise refusal(Reason.BAD_REQUEST, what) from None

    def _take_header(self, header: Message) -> None:
        """Check it, and note what it announces."""
        check_header(header)
        match header:
            case pb.Begin():
                self._num_begins += 1
                if self._num_begins > _MAX_BEGINS:
                    raise refusal(Reason.BAD_REQUEST, f"Begin came {_MAX_BEGINS + 1} times without a Contribution")
                self.owe(header.num_bytes)
            case pb.Contribution():
                if not self._num_begins:
                    self.owe(header.payload.num_bytes)
                self._num_begins = 0
            case pb.InitialWeights():
                self.owe(header.payload_bytes)
            case pb.Taken():
                self._lent_since = None
            case pb.Finish() | pb.Leave():  # what was begun is not completed any more
                self._owed = self._num_begins = 0

    def owe(self, num_bytes: int) -> None:
        """So many bytes are to come."""
        self._owed = num_bytes
        self._allowance.renew()

    def _take_piece(self, num_bytes: int) -> None:
        self._owed = max(0, self._owed - num_bytes)
        if self._reading_since is not None:
            waited_s = self._time() - self._reading_since if self._is_pressing() else 0.0
            self._reading_since = None
            self._allowance.came(num_bytes, waited_s)

    def _is_pressing(self) -> bool:
        """Before its facts a payload comes at the pace of a computation, which may be slow while it is in nobody's
        way."""
        return not self._num_begins or self._is_memory_wanted()

    async def read_payload(self, first: Frame, target: memoryview) -> bool:
        """The payload announced by `first`, into `target`; False when the stream ended before it was whole."""

        def write(offset: int, data: memoryview) -> None:
            target[offset : offset + len(data)] = data

        reader = PayloadReader(len(target), write)
        reader.feed(first)
        while not reader.is_complete:
            piece = await self.read("")
            if piece is None:
                return False
            reader.feed(piece)
        return True

    # ---- out ------------------------------------------------------------------------------

    async def write(self, raw: bytes) -> None:
        """Send a message. Returns when the one before it has been taken by the connection, so that the
        next read, or the making of the next message, does not wait for this one."""
        self.num_sent += len(raw)
        await self.flush()
        if self._direct is None:
            self._writing_since = self._time()
            self._writing = asyncio.ensure_future(self._context.write(raw))
        else:
            self._write_direct(self._direct, on_the_wire(raw))

    async def write_payload(self, message: Placed) -> None:
        """Over a direct connection: a message, and the bytes that it places. They are read until `flush` returns."""
        assert self._direct is not None
        self.num_sent += sum(map(len, message.pieces))
        await self.flush()
        self._write_direct(self._direct, on_the_wire(message))

    def _write_direct(self, connection: Connection, pieces: list[bytes | memoryview]) -> None:
        try:
            left = pieces if is_large(pieces) else connection.send_now(pieces)
        except OSError as error:
            raise StreamLost from error
        if left:
            self._writing_since = self._time()
            self._writing = asyncio.ensure_future(connection.send(left))

    def write_now(self, raw: bytes) -> bool:
        """The same over a direct connection, at once; False where the message before has not been taken yet."""
        assert self._direct is not None
        if self._writing is not None:
            return False
        self.num_sent += len(raw)
        self._write_direct(self._direct, on_the_wire(raw))
        return True

    async def say(self, message: pb.ServerMessage) -> None:
        """Send a message without a payload."""
        await self.write(message.SerializeToString())

    async def say_waiting(self, reason: str) -> None:
        """What the worker waits for, which is said by the clock."""
        raw = pb.ServerMessage(waiting=pb.Waiting(reason=reason)).SerializeToString()
        self.num_in_waiting += len(raw)
        await self.write(raw)

    def take_sent(self) -> tuple[int, int]:
        """Bytes sent since this was asked last, and how many of them said what was waited for."""
        found = self.num_sent, self.num_in_waiting
        self.num_sent = self.num_in_waiting = 0
        return found

    async def write_placed(self, start: int, end: int) -> None:
        """Say that these bytes of a payload lie in shared memory; they count as sent."""
        self.num_sent += end - start
        await self.write(placed_frame(start, end - start))

    async def wait(self, result: Awaitable[Result], why: Callable[[], str]) -> Result:
        """The result, of which the worker is told every second why it is not there."""
        waiting = asyncio.ensure_future(result)
        try:
            while not (await asyncio.wait({waiting}, timeout=_SAY_WAITING_S))[0]:
                await self.say_waiting(why())
            return waiting.result()
        finally:
            waiting.cancel()

    def lend(self) -> None:
        """All of a reply lies in shared memory: the worker owes a Taken."""
        self._lent_since = self._time()

    async def flush(self) -> None:
        """Wait until everything written has been taken by the connection."""
        if self._writing is not None:
            try:
                await self._writing
            except Exception as error:
                raise self._meaning_of(error) from error
            self._writing = None

    # ---- the end --------------------------------------------------------------------------

    def end(self, error: ParamServerError | None = None) -> None:
        """End the call, whatever it is waiting for; with a refusal if there is an error."""
        self.refused = self.refused or error
        if self._task is not None:
            self._task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        """End the call with a status: raises what gRPC does. What was written before goes first, if the peer takes
        it: gRPC loses a status that overtakes the first message."""
        if self._writing is not None and not self._writing.done():
            # Whoever cancels this task now wants what is being done already.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self._writing}, timeout=_SETTLE_S)
        if self._direct is not None:  # the worker looks there, and then for the status
            self._direct.close()
        await self._context.abort(code, details, metadata)

    def close(self) -> None:
        """The call is over: nobody waits for the last message any more."""
        self._watch.remove(self)
        if self._direct is not None:
            self._direct.close()
        if self._writing is not None:
            self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())
            if self._too_slow_at is not None:
                self._writing.cancel()

    def look(self, now: float) -> None:
        """End the call of a peer that keeps the server waiting; see `limits.Watch`."""
        if self._too_slow_at is not None:
            if now - self._too_slow_at > _REFUSING_S:
                self._too_slow_at = now
                self.end()
        elif (what := self._overdue(now)) is not None:
            self._too_slow_at = now
            self.end(
                refusal(
                    Reason.TOO_SLOW,
                    f"{what} within {self._allowance.limit_s:g} s (limits.progress_s)",
                    fix="the worker joins again by itself; for a slower connection start ps-server with "
                    "--set limits.progress_s=...",
                )
            )

    def _overdue(self, now: float) -> str | None:
        """What has not happened in time."""
        limit_s = self._allowance.limit_s
        if self._reading_since is not None:
            waited_s = now - self._reading_since
            if waited_s > self._allowance.left_s and self._is_pressing():
                return f"{self._owed} bytes of an upload are missing, and less than {CHUNK_BYTES} of them came"
        is_writing = self._writing is not None and not self._writing.done()
        if is_writing and now - self._writing_since > limit_s:
            return "a reply was sent, and nothing of it was read"
        if self._lent_since is not None and now - self._lent_since > limit_s:
            return "a reply was placed in shared memory, and no Taken came"
        return None

    def stood_still(self, seconds: float) -> None:
        """This process was frozen: see `limits.Watch`."""
        if self._reading_since is not None:
            self._reading_since += seconds
        if self._lent_since is not None:
            self._lent_since += seconds
        self._writing_since += seconds
