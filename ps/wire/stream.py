"""One worker's stream on the server: whole frames in and out, bytes counted, and a limit on every wait for the peer.

A peer owes the bytes that it announced, room for the bytes that are sent to it, and a Taken for a reply in shared
memory. For each of them it has `limits.progress_s` without progress. The limit does not run while the server waits for
memory, for a round or for the next contribution: the peer owes nothing then.
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
from ...common.wire.direct import OutOfBand, on_the_wire
from ...common.wire.frames import CHUNK_BYTES, Frame, PayloadReader, out_of_band_frame, parse
from ...proto import parameter_server_pb2 as pb
from .connection import Connection, is_large
from .limits import Allowance, Pace, Watch

Result = TypeVar("Result")

# A worker begins again when it finds that the bytes it has sent were not its gradient yet.
_MAX_BEGINS = 8
# A peer that does not even take a refusal is dropped.
_SETTLE_S = 0.5
_REFUSING_S = 2.0
_SAY_WAITING_S = 1.0


class StreamLost(Exception):
    """The worker's end of the stream is gone."""


class StreamBroken(Exception):
    """Reading or writing failed, and the connection did not: a bug, which another connection would meet too."""


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
        self._direct: Connection | None = None  # that messages go over
        self._writing: asyncio.Future[None] | None = None
        self.rank: int | None = None  # once it has one
        self.num_received = self.num_sent = 0  # bytes, without Waiting messages, since they were taken
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
            raise self._lost(error) from error
        if raw is grpc.aio.EOF or raw is None:
            self._owed, self._reading_since = 0, None
            return None
        received = parse(pb.WorkerMessage, raw)
        if self._pace is not None:
            self._pace.take(len(raw))
        self.num_received += len(raw) + received.out_of_band
        if (received.kind or "") not in kinds:
            expected = " or ".join(kind or "a piece of a payload" for kind in kinds)
            raise refusal(Reason.BAD_REQUEST, f"got {received.kind or 'a piece of a payload'}, expected {expected}")
        if received.header is not None:
            self._take_header(received.header)
        if self._owed and received.kind != "rows":
            num_out_of_band = received.out_of_band if self._direct is None else 0
            self._take_piece(len(received.data) + num_out_of_band + received.left_out)
        return received

    def take_now(self, raw: bytes, take: Callable[[Frame], bool]) -> bool:
        """Give a message that was read elsewhere to `take`; False, and it counts as not received, if that says no."""
        received = parse(pb.WorkerMessage, raw)
        if received.header is not None:
            check_header(received.header)
        self.num_received += len(raw)
        if not (is_taken := take(received)):
            self.num_received -= len(raw)
        return is_taken

    @property
    def direct(self) -> Connection | None:
        """The direct connection, where its messages may be read and written outside of this stream's task: no limit on
        the pace of uploads."""
        return self._direct if self._pace is None else None

    def go_direct(self, connection: Connection) -> None:
        """All further messages go over this connection."""
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
                raise self._lost(error) from error
            if not num_bytes:
                raise StreamLost
            if self._pace is not None:
                self._pace.take(num_bytes)
            self._take_piece(num_bytes)
            done += num_bytes

    def _lost(self, error: Exception) -> StreamLost | StreamBroken:
        """The meaning of an exception of reading or writing."""
        is_gone = isinstance(error, _GONE) or (self._direct is not None and self._direct.is_closed)
        return StreamLost() if is_gone else StreamBroken()

    async def read_within(self, timeout_s: float, *kinds: str) -> Frame | None:
        """The next message of a worker that has not been let in yet, or that others wait for."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.read(*kinds)
        except TimeoutError:
            name = kinds[0].replace("_", " ").capitalize()
            message = f"no {name} within {timeout_s:g} s (server.join_timeout_s)"
            raise refusal(Reason.BAD_REQUEST, message) from None

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

    async def write(self, message: bytes | OutOfBand) -> None:
        """Send a message, on a direct connection perhaps with bytes that follow it. Returns when the connection has
        taken the message before, so that the caller goes on while this one leaves."""
        self.num_sent += len(message) if isinstance(message, bytes) else sum(map(len, message.pieces))
        await self._write(message)

    async def _write(self, message: bytes | OutOfBand) -> None:
        await self.flush()
        if self._direct is not None:
            self._write_direct(self._direct, message)
        elif isinstance(message, bytes):
            self._writing_since = self._time()
            self._writing = asyncio.ensure_future(self._context.write(message))

    def _write_direct(self, connection: Connection, message: bytes | OutOfBand) -> None:
        pieces = on_the_wire(message)
        try:
            unsent = pieces if is_large(pieces) else connection.send_now(pieces)
        except OSError as error:
            raise StreamLost from error
        if unsent:
            self._writing_since = self._time()
            self._writing = asyncio.ensure_future(connection.send(unsent))

    def write_now(self, raw: bytes, is_counted: bool = True) -> bool:
        """Send a message over the direct connection at once; False where the message before has not been taken yet."""
        assert self._direct is not None
        if self._writing is not None:
            return False
        self.num_sent += len(raw) if is_counted else 0
        self._write_direct(self._direct, raw)
        return True

    async def say(self, message: pb.ServerMessage) -> None:
        """Send a message without a payload."""
        await self.write(message.SerializeToString())

    async def say_waiting(self, reason: str) -> None:
        """Tell the worker why it waits. These bytes are not counted: their number depends on the clock."""
        await self._write(pb.ServerMessage(waiting=pb.Waiting(reason=reason)).SerializeToString())

    def take_sent(self) -> int:
        """The bytes sent since the last call."""
        num_sent, self.num_sent = self.num_sent, 0
        return num_sent

    async def write_out_of_band(self, start: int, end: int) -> None:
        """Say that these bytes of a payload lie in shared memory; they count as sent."""
        self.num_sent += end - start
        await self.write(out_of_band_frame(start, end - start))

    async def wait(self, result: Awaitable[Result], why: Callable[[], str]) -> Result:
        """The result; until it is there the worker is told every second why it waits."""
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
                raise self._lost(error) from error
            self._writing = None

    # ---- the end --------------------------------------------------------------------------

    def end(self, error: ParamServerError | None = None) -> None:
        """End the call, whatever it is waiting for; with a refusal if there is an error."""
        self.refused = self.refused or error
        if self._task is not None:
            self._task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        """End the call with a status; raises what gRPC does. Messages that were written before go first, if the peer
        takes them: gRPC loses a status that overtakes the first message."""
        if self._writing is not None and not self._writing.done():
            # A cancellation wants the call to end, which it does already.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self._writing}, timeout=_SETTLE_S)
        if self._direct is not None:  # the worker looks there first, and then for the status
            self._direct.close()
        await self._context.abort(code, details, metadata)

    def close(self) -> None:
        """The call is over: the last message is not waited for."""
        self._watch.remove(self)
        if self._direct is not None:
            self._direct.close()
        if self._writing is not None:
            self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())
            if self._too_slow_at is not None:
                self._writing.cancel()

    def look(self, now: float) -> None:
        """End the call of a peer that keeps the server waiting, as `limits.Watch` asks."""
        if self._too_slow_at is not None:
            if now - self._too_slow_at > _REFUSING_S:
                self._too_slow_at = now
                self.end()
        elif (overdue := self._overdue(now)) is not None:
            self._too_slow_at = now
            self.end(
                refusal(
                    Reason.TOO_SLOW,
                    f"{overdue} within {self._allowance.limit_s:g} s (limits.progress_s)",
                    fix="the worker joins again by itself; for a slower connection start ps-server with "
                    "--set limits.progress_s=...",
                )
            )

    def _overdue(self, now: float) -> str | None:
        """What the peer has not done in time, as a phrase."""
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
        """This process was frozen for a while, which does not count."""
        if self._reading_since is not None:
            self._reading_since += seconds
        if self._lent_since is not None:
            self._lent_since += seconds
        self._writing_since += seconds
