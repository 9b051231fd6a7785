"""One worker's stream on the server: it reads and writes frames, counts bytes, and limits every wait for the peer.

The peer must send the bytes that it announced, receive the bytes that are sent to it, and send Taken for a reply in
shared memory. Each may pause for at most `limits.progress_s`. The limit does not apply while the server waits for
memory, for a round or for the next contribution.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from ...common.config.schema import LimitsConfig
from ...common.errors import ParamServerError, Reason, refusal
from ...common.standstill import Standstill
from ...common.wire.checks import check_header
from ...common.wire.direct import OutOfBand, to_buffers
from ...common.wire.frames import CHUNK_BYTES, Frame, PayloadReader, parse
from ...proto import parameter_server_pb2 as pb
from .connection import LEAST_HANDED_OVER, Connection

Result = TypeVar("Result")

# A worker begins an upload again if a gradient changed after it was sent.
_MAX_BEGINS = 8
_SETTLE_S = 0.5  # for the peer to receive earlier messages before the status
_REFUSING_S = 2.0  # after a refusal, before the call is cancelled again
_SAY_WAITING_S = 1.0
_CHECK_INTERVAL_S = 0.2


class StreamLost(Exception):
    """The stream ended because the worker's side is gone."""


class StreamEnded(StreamLost):
    """The worker has ended its side of the stream."""


class StreamBroken(Exception):
    """Reading or writing failed although the connection works. That is a bug, which a new connection would repeat."""


# Exceptions of gRPC and sockets if the peer is gone.
_GONE = (OSError, grpc.RpcError, grpc.aio.BaseError)


def reader_into(target: memoryview) -> PayloadReader:
    """Return a reader that writes a payload of this length to `target`."""

    def write(offset: int, data: memoryview) -> None:
        target[offset : offset + len(data)] = data

    return PayloadReader(len(target), write)


class Stream:
    """One worker's stream, used by one task, which `end` cancels.

    `refused` is the refusal with which the call ends. `is_memory_wanted` returns whether other workers wait for the
    memory of an upload.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        limits: LimitsConfig,
        watch: Watchdog,
        is_memory_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self.direct: Connection | None = None  # if set, all further messages use it instead of gRPC
        self._writing: asyncio.Future[None] | None = None
        self.rank: int | None = None  # None until the worker has a rank
        self.bytes_read = self.bytes_written = 0  # not in the worker's traffic yet; without Waiting messages
        self.refused: ParamServerError | None = None
        self._time = asyncio.get_running_loop().time
        self._task = asyncio.current_task()
        self._is_memory_wanted = is_memory_wanted
        self._limiter = None if limits.upload_bytes_per_s is None else RateLimiter(limits.upload_bytes_per_s)
        self._time_budget = TimeBudget(limits.progress_s, CHUNK_BYTES)
        self._num_missing = 0  # announced bytes that have not arrived
        self._num_begins = 0  # Begin messages since the last Contribution
        self._reading_since = math.inf  # since when the server waits for an upload; inf: it does not
        self._writing_since = 0.0  # when CHUNK_BYTES of this message were sent, or it began
        self._num_written = 0  # bytes of it since then
        self._taken_missing_since = math.inf  # likewise, for Taken
        self._too_slow_at: float | None = None
        self._watch = watch
        watch.add(self)

    # ---- in -------------------------------------------------------------------------------

    async def read(self, *kinds: str) -> Frame:
        """Return the next frame. Raises StreamEnded, and a BAD_REQUEST refusal if its kind is not in `kinds`.

        The kind "" is a piece of a payload without a header.
        """
        if self._limiter is not None and (wait_s := self._limiter.wait_s()):
            await asyncio.sleep(wait_s)
        if self._num_missing:
            self._reading_since = self._time()
        try:
            raw = await (self.direct or self._context).read()
        except ParamServerError:
            raise
        except Exception as error:
            raise self._lost(error) from error
        if raw is grpc.aio.EOF or raw is None:
            self._num_missing, self._reading_since = 0, math.inf
            raise StreamEnded
        received = parse(pb.WorkerMessage, raw)
        if self._limiter is not None:
            self._limiter.consume(len(raw))
        self.bytes_read += len(raw) + received.out_of_band
        if (received.kind or "") not in kinds:
            expected = " or ".join(kind or "a piece of a payload" for kind in kinds)
            raise refusal(Reason.BAD_REQUEST, f"got {received.kind or 'a piece of a payload'}, expected {expected}")
        if received.header is not None:
            self._take_header(received.header)
        if self._num_missing and received.kind != "rows":
            num_out_of_band = received.out_of_band if self.direct is None else 0
            self._take_piece(len(received.data) + num_out_of_band + received.left_out)
        return received

    async def receive_into(self, target: memoryview) -> AsyncIterator[int]:
        """Fill `target` with the bytes that follow a message on a direct connection.

        Yields the number of new bytes after at least CHUNK_BYTES, and at the end.
        """
        assert self.direct is not None
        done = given = 0
        while done < len(target):
            end = len(target)
            if self._limiter is not None:
                await asyncio.sleep(self._limiter.wait_s())
                end = min(end, done + CHUNK_BYTES)
            self._reading_since = self._time()
            try:
                num_bytes = await self.direct.receive_some(target[done:end])
            except Exception as error:
                raise self._lost(error) from error
            if not num_bytes:
                raise StreamLost
            if self._limiter is not None:
                self._limiter.consume(num_bytes)
            self._take_piece(num_bytes)
            done += num_bytes
            if done - given >= CHUNK_BYTES or done == len(target):
                yield done - given
                given = done

    def _lost(self, error: Exception) -> StreamLost | StreamBroken:
        """Return the exception that stands for a failure of reading or writing."""
        is_gone = isinstance(error, _GONE) or (self.direct is not None and self.direct.is_closed)
        return StreamLost() if is_gone else StreamBroken()

    async def read_within(self, timeout_s: float | None, *kinds: str) -> Frame:
        """Return the next frame, as `read` does. Raises a BAD_REQUEST refusal after `timeout_s` s; None: never."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.read(*kinds)
        except TimeoutError:
            name = kinds[0].replace("_", " ").capitalize()
            message = f"no {name} within {timeout_s:g} s (server.join_timeout_s)"
            fix = "if the machine of the worker is that slow, more: --set server.join_timeout_s=300"
            raise refusal(Reason.BAD_REQUEST, message, fix=fix) from None

    def _take_header(self, header: Message) -> None:
        """Check a header, and count the bytes that it announces."""
        check_header(header)
        match header:
            case pb.Begin():
                self._num_begins += 1
                if self._num_begins > _MAX_BEGINS:
                    raise refusal(Reason.BAD_REQUEST, f"Begin came {_MAX_BEGINS + 1} times without a Contribution")
                self.expect(header.num_bytes)
            case pb.Contribution():
                if not self._num_begins:
                    self.expect(header.payload.num_bytes)
                self._num_begins = 0
            case pb.InitialWeights():
                self.expect(header.payload_bytes)
            case pb.Taken():
                self._taken_missing_since = math.inf
            case pb.Finish() | pb.Leave():  # the worker will not complete an upload that it began
                self._num_missing = self._num_begins = 0
                self._reading_since = math.inf

    def expect(self, num_bytes: int) -> None:
        """Expect `num_bytes` from the peer."""
        self._num_missing = num_bytes
        self._time_budget.reset()

    def _take_piece(self, num_bytes: int) -> None:
        self._num_missing = max(0, self._num_missing - num_bytes)
        if self._reading_since < math.inf:
            waited_s = self._time() - self._reading_since if self._is_pressing() else 0.0
            self._reading_since = math.inf
            self._time_budget.add_bytes(num_bytes, waited_s)

    def _is_pressing(self) -> bool:
        """Whether the time limit applies to the upload.

        Before its Contribution message, a payload arrives as fast as backward runs. The limit then applies only if
        other workers wait for the memory.
        """
        return not self._num_begins or self._is_memory_wanted()

    async def read_payload(self, first: Frame, target: memoryview) -> None:
        """Read the payload announced by `first` into `target`."""
        reader = reader_into(target)
        reader.feed(first)
        while not reader.is_complete:
            reader.feed(await self.read(""))

    # ---- out ------------------------------------------------------------------------------

    async def write(self, message: bytes | OutOfBand, is_counted: bool = True) -> None:
        """Send a message. On a direct connection, payload bytes may follow it.

        This returns once the connection has accepted the previous message, so that the caller continues while this one
        is sent.
        """
        await self.flush()
        if self.direct is not None:
            self.write_now(message, is_counted)
            return
        assert isinstance(message, bytes)
        self.bytes_written += len(message) if is_counted else 0
        self._writing_since = self._time()
        self._writing = asyncio.ensure_future(self._context.write(message))

    def write_now(self, message: bytes | OutOfBand, is_counted: bool = True) -> bool:
        """Send a message over the direct connection at once. Returns False while the previous one is being sent."""
        assert self.direct is not None
        if self._writing is not None:
            return False
        if is_counted:
            self.bytes_written += len(message) if isinstance(message, bytes) else sum(map(len, message.pieces))
        unsent = to_buffers(message)
        if sum(map(len, unsent)) < LEAST_HANDED_OVER:
            try:
                unsent = self.direct.send_now(unsent)
            except OSError as error:
                raise StreamLost from error
        if unsent:
            self._num_written, self._writing_since = 0, self._time()
            self._writing = asyncio.ensure_future(self.direct.send(unsent, self._wrote))
        return True

    def _wrote(self, num_bytes: int) -> None:
        self._num_written += num_bytes
        if self._num_written >= CHUNK_BYTES:
            self._num_written, self._writing_since = 0, self._time()

    async def say(self, message: pb.ServerMessage) -> None:
        """Send a message without a payload."""
        await self.write(message.SerializeToString())

    async def say_waiting(self, reason: str) -> None:
        """Send the worker the reason for its wait. The bytes are not counted, as their number depends on time."""
        await self.write(pb.ServerMessage(waiting=pb.Waiting(reason=reason)).SerializeToString(), is_counted=False)

    async def wait(self, result: Awaitable[Result], why: Callable[[], str]) -> Result:
        """Await `result`, and send the worker the reason for its wait every second."""
        waiting = asyncio.ensure_future(result)
        try:
            while not (await asyncio.wait({waiting}, timeout=_SAY_WAITING_S))[0]:
                await self.say_waiting(why())
            return waiting.result()
        finally:
            waiting.cancel()

    def expect_taken(self) -> None:
        """Expect a Taken, because a whole reply is in shared memory."""
        self._taken_missing_since = self._time()

    async def flush(self) -> None:
        """Wait until the connection has accepted all messages."""
        if self._writing is not None:
            try:
                await self._writing
            except Exception as error:
                raise self._lost(error) from error
            self._writing = None

    # ---- the end --------------------------------------------------------------------------

    def end(self, error: ParamServerError | None = None) -> None:
        """End the call, also while it waits. With `error`, it ends with this refusal."""
        self.refused = self.refused or error
        if self._task is not None:
            self._task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        """End the call with a status. It raises gRPC's exception.

        Earlier messages are sent first, if the peer receives them, because gRPC loses a status that overtakes the first
        message.
        """
        if self._writing is not None and not self._writing.done():
            # The call ends in any case, so a cancellation needs no further handling.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self._writing}, timeout=_SETTLE_S)
        if self.direct is not None:  # the worker reads it until its end, and then the status
            self.direct.close()
        await self._context.abort(code, details, metadata)

    def close(self) -> None:
        """Release the stream at the end of its call, without waiting for the last message."""
        self._watch.remove(self)
        if self.direct is not None:
            self.direct.close()
        if self._writing is not None:
            self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())
            if self._too_slow_at is not None:
                self._writing.cancel()

    def check(self, now: float, pause_s: float) -> None:
        """End the call if the peer keeps the server waiting for too long. `Watchdog` calls this.

        `pause_s`: seconds in which this process itself did not run. They do not count.
        """
        self._reading_since += pause_s
        self._taken_missing_since += pause_s
        self._writing_since += pause_s
        if self._too_slow_at is not None:
            if now - self._too_slow_at > _REFUSING_S:
                self._too_slow_at = now
                self.end()
            return
        limit_s, overdue = self._time_budget.limit_s, ""
        is_writing = self._writing is not None and not self._writing.done()
        if now - self._reading_since > self._time_budget.left_s and self._is_pressing():
            overdue = f"{self._num_missing} bytes of an upload are missing, and less than {CHUNK_BYTES} of them came"
        elif is_writing and now - self._writing_since > limit_s:
            overdue = f"the worker read less than {CHUNK_BYTES} bytes of a reply"
        elif now - self._taken_missing_since > limit_s:
            overdue = "the worker sent no Taken for a reply in shared memory"
        if overdue:
            self._too_slow_at = now
            problem = f"{overdue} within {limit_s:g} s (limits.progress_s)"
            fix = "the worker joins again by itself; for a slower connection start ps-server with "
            self.end(refusal(Reason.TOO_SLOW, problem, fix=f"{fix}--set limits.progress_s=..."))


class Watchdog:
    """Calls `check` of all open streams every _CHECK_INTERVAL_S seconds, so that no message needs a timer."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._checking: asyncio.Task[None] | None = None

    def add(self, stream: Stream) -> None:
        """Watch a stream until `remove`."""
        self._streams.add(stream)
        if self._checking is None:
            self._checking = asyncio.ensure_future(self._check_all())

    def remove(self, stream: Stream) -> None:
        self._streams.discard(stream)

    async def _check_all(self) -> None:
        time, standstill = asyncio.get_running_loop().time, Standstill(_CHECK_INTERVAL_S)
        standstill.look(time())
        try:
            while self._streams:
                await asyncio.sleep(_CHECK_INTERVAL_S)
                now = time()
                pause_s = standstill.look(now)
                for stream in list(self._streams):
                    stream.check(now, pause_s)
        finally:
            self._checking = None


# ---- limits --------------------------------------------------------------------------------------
# Limits what one peer can cost the server: joins, bytes of uploads, and the time that others wait for it.


AnyMessage = TypeVar("AnyMessage")

_LOG_INTERVAL_S = 1.0


class RateLimiter:
    """A token-bucket rate limit: `per_s` units per second, with bursts of the units of `burst_s` seconds."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic, burst_s: float = 1.0) -> None:
        self._s_per_unit, self._burst_s, self._now = 1 / per_s, burst_s, now
        self._free_at = float("-inf")

    def consume(self, count: int) -> None:
        """Use `count` units, without waiting."""
        self._free_at = max(self._free_at, self._now() - self._burst_s) + count * self._s_per_unit

    def wait_s(self) -> float:
        """Return the seconds until the caller may use more units."""
        return max(0.0, self._free_at - self._now())


class LogThrottle:
    """Limits log lines to one per second, so that a peer that calls repeatedly cannot fill the disk."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._next_s, self._num_suppressed = now, float("-inf"), 0

    def log(self, write: Callable[..., object], event: str, **fields: object) -> None:
        """Write a line with `left_out`, the number of lines suppressed since the last one, or suppress it too."""
        if (now := self._now()) < self._next_s:
            self._num_suppressed += 1
            return
        write(event, **fields, left_out=self._num_suppressed)
        self._num_suppressed, self._next_s = 0, now + _LOG_INTERVAL_S


class JoinQueue(RateLimiter):
    """Admits `per_s` joins per second, and as many at once. At most `limit` further joins wait in a queue.

    A worker that leaves the queue still uses its turn.
    """

    def __init__(self, per_s: float, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        # A burst has `per_s` joins, because the delay is read before a join is counted.
        super().__init__(per_s, now, burst_s=max(0.0, 1.0 - 1 / per_s))
        self._limit = limit

    def reserve(self) -> float:
        """Enter the queue, and return the seconds until the turn. Raises a NOT_READY refusal if the queue is full."""
        wait_s = self.wait_s()
        if wait_s / self._s_per_unit > self._limit + 1e-3:  # the clock is rounded
            rate = f"{1 / self._s_per_unit:g} joins in a second (limits.joins_per_s)"
            problem = f"{self._limit} workers wait to join, at {rate}"
            raise refusal(Reason.NOT_READY, problem, fix="try again in a moment")
        self.consume(1)
        return wait_s


class TimeBudget:
    """The time for which a sender may keep the server waiting, at most `limit_s` seconds.

    Waiting reduces the allowance, and received bytes restore it: `bytes_per_limit` bytes restore all of it. So one
    pause may last `limit_s`. A sender whose average is below `bytes_per_limit / limit_s` uses the allowance up, even if
    it sends small pieces often.
    """

    def __init__(self, limit_s: float, bytes_per_limit: int) -> None:
        self.limit_s = self.left_s = limit_s
        self._s_per_byte = limit_s / bytes_per_limit

    def add_bytes(self, num_bytes: int, waited_s: float) -> None:
        """Count `num_bytes` that arrived after `waited_s` seconds."""
        self.left_s = min(self.limit_s, self.left_s - waited_s + num_bytes * self._s_per_byte)

    def reset(self) -> None:
        """Restore the whole allowance."""
        self.left_s = self.limit_s


class FirstMessages:
    """Waits for the first message of each call, which names the caller.

    A call must send it within `limit_s`. At most `limit` calls may be silent at once. Beyond that, the oldest silent
    call ends, since a correct caller sends its first message at once.
    """

    def __init__(self, name: str, limit_s: float, limit: int) -> None:
        self._name, self._limit_s, self._limit = name, limit_s, limit
        self._deadlines: list[asyncio.Timeout] = []  # of silent calls, oldest first

    async def first_of(self, messages: AsyncIterator[AnyMessage]) -> AnyMessage | None:
        """Return the first message, or None if the call ended. Raises a BAD_REQUEST refusal if it is late."""
        deadline = asyncio.timeout(self._limit_s)
        try:
            async with deadline:
                self._deadlines.append(deadline)
                if len(self._deadlines) > self._limit and not (oldest := self._deadlines.pop(0)).expired():
                    oldest.reschedule(asyncio.get_running_loop().time())
                return await anext(messages, None)
        except TimeoutError:
            limit = f"within {self._limit_s:g} s (server.join_timeout_s)"
            when = limit if deadline in self._deadlines else f"before {self._limit} newer calls"
            raise refusal(Reason.BAD_REQUEST, f"no {self._name} {when}") from None
        finally:
            if deadline in self._deadlines:
                self._deadlines.remove(deadline)
