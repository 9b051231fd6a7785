"""One stream to the server, seen from the worker: frames out, frames in, synchronous.

Everything that can go wrong with a connection becomes `Lost`; everything the server refuses
becomes the error of its reason.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import torch

from ...common.errors import ParamServerError, Reason, UnreachableError, refusal, shown
from ...common.reporting.log import get_logger
from ...common.security import PLAINTEXT, Credentials
from ...common.tensors.layout import Layout, as_bytes
from ...common.tensors.optimizers import TableSpec
from ...common.tls_probe import diagnose
from ...common.wire.checks import check_header
from ...common.wire.direct import Placed
from ...common.wire.frames import MAX_MESSAGE_BYTES, Frame, PayloadReader, parse
from ...common.wire.protocol import SERVICE, layout_from_proto, refusal_from_status
from ...proto import parameter_server_pb2 as pb
from ..session import Retry
from ..transports.limit import NO_LIMIT, Limit
from .direct import Direct, DirectError
from .interrupts import sleep, uninterrupted
from .messages import chunks, message
from .security import open_channel, wait_until_ready

log = get_logger()

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # To an address that does not reply gRPC tries to connect for 20 s; its own back-off reaches two minutes.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Every worker process has its own connection.
    ("grpc.use_local_subchannel_pool", 1),
)

# How long a ping waits for its reply, ms. keepalive alone notices a frozen peer after 61 s; with the least it takes 3
# to 4 s. But a ping stands in line behind what was sent before it: 4 MB at 10 Mbit/s are 3 s, and a contribution would
# never arrive. So a connection that was lost for that is followed by one that waits twice as long.
_LEAST_PING_MS, _MOST_PING_MS = 2000, 16_000
_UNANSWERED = ("ping timeout", "timed out")  # as gRPC says it, and the kernel, for which gRPC sets the same limit

# Of a whole model no total is a limit: 1 GB at 25 Mbit/s takes 320 s. Its first message waits for the pulls of others.
_PULL_S = 300.0
_PULL_PROGRESS_S = 60.0  # between two messages of 1 MiB: 140 kbit/s
_STATUS_S = 2.0  # within which a stream says why it has ended

# Refusals after which the same process may simply join again.
_JOIN_AGAIN = (Reason.NOT_JOINED, Reason.DRAINING, Reason.NOT_READY, Reason.TOO_SLOW)


class Lost(Exception):
    """The connection is gone, or was never there; the text says what gRPC said."""


def wait_for_server(retry: Retry, lost: Lost) -> None:
    """Returns when it is time to try again; the first time it says whom it waits for. Raises UnreachableError past
    the give-up time."""
    delay_s, reason = retry.failed(time.monotonic(), str(lost)), str(lost)
    if retry.num_failures == 1:
        log.info("waiting_for_server", address=retry.address, reason=reason, gives_up_in_s=retry.give_up_s)
    sleep(delay_s)


class Client:
    """A channel to one server, and on it one Exchange stream at a time."""

    def __init__(self, address: str, credentials: Credentials = PLAINTEXT, limit: Limit = NO_LIMIT) -> None:
        self.address = address
        self._limit = limit
        self._credentials = credentials
        self._ping_ms = _LEAST_PING_MS
        self._channel = self._open_channel()
        self._outgoing: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._direct: Direct | None = None
        self._is_direct = False  # what is said goes over it
        self._call: Any = None
        self._is_reading = False
        self._cause = ""  # of the last attempt to connect
        # A channel that is still open when the interpreter ends waits for a thread that is gone by then.
        atexit.register(self.close)

    def _open_channel(self) -> grpc.Channel:
        pings = [(f"grpc.{name}_ms", self._ping_ms) for name in ("keepalive_timeout", "http2.ping_timeout")]
        return open_channel(self.address, self._credentials, (*OPTIONS, *pings))

    def open(self, timeout_s: float) -> None:
        """Connect and begin a stream; Lost when the server does not reply within `timeout_s`. A mistake in the
        TLS settings, its or ours, is an AuthError at once, something else at its address an UnreachableError."""
        self.close_stream()
        self._cause = "no reply"
        if not wait_until_ready(self._channel, timeout_s, self._explain):
            raise Lost(self._cause)
        self._outgoing = queue.SimpleQueue()
        exchange = self._channel.stream_stream(f"/{SERVICE}/Exchange")
        self._call = exchange(_drain(self._outgoing, self._limit), metadata=self._credentials.metadata)
        self._is_reading = False

    def go_direct(self, welcome: pb.Welcome) -> str:
        """Connect where the server says; why that cannot be, empty when it can: from `offer` on all is said there."""
        if not welcome.HasField("direct"):
            return "the server has no direct port"
        try:
            told = welcome.direct
            direct = Direct(self.address, told.port, told.ticket, self._credentials, self._limit)
            self._direct = direct
        except DirectError as error:
            return str(error)
        self._call.add_callback(direct.hang_up)
        return ""

    def offer(self, model: pb.Model) -> None:
        """Say what this worker trains; the last word on the stream where there is a direct connection."""
        model.direct = self._direct is not None
        self.say(model=model)
        self._is_direct = model.direct

    def _explain(self) -> None:
        """A connection has failed: take certificates that were renewed meanwhile, or say what is wrong."""
        renewed = self._credentials.renewed()
        if renewed != self._credentials:
            self._channel.close()
            self._credentials = renewed
            self._channel = self._open_channel()
            raise Lost("the certificates were renewed")
        try:
            mistake = diagnose(self.address, renewed)
        except OSError as error:
            self._cause = (error.strerror or str(error) or "no reply").lower()
            return
        if mistake is not None:
            raise mistake

    def send(self, frames: Iterable[bytes | Placed]) -> None:
        """Queue messages; a generator is drawn from only as fast as the connection takes them."""
        if self._is_direct and self._direct is not None:
            self._direct.send(frames)
        else:
            self._outgoing.put(frames)  # type: ignore[arg-type]  # only a direct connection is given what is placed

    def say(self, **kind: Any) -> None:
        """Queue one small message, e.g. `say(leave={...})`, the fields of Leave."""
        self.send(message(**kind))

    def receive(self) -> Frame:
        """The next message. Raises Lost, or the refusal that ended the stream."""
        self._is_reading = True
        with uninterrupted:
            received = self._next()
            self._is_reading = False
        return received

    def _next(self) -> Frame:
        if not self._is_direct or self._direct is None:
            try:
                return _next_of(self._call, self._limit)
            except Lost as lost:
                if any(said in str(lost) for said in _UNANSWERED) and self._ping_ms < _MOST_PING_MS:
                    self._ping_ms *= 2
                    self._channel.close()
                    self._channel = self._open_channel()
                raise
        try:
            return parse(pb.ServerMessage, self._direct.receive())
        except (OSError, EOFError, ValueError) as error:
            raise self._why_lost(error) from None

    def _why_lost(self, error: Exception) -> Exception:
        """A direct connection has ended: the stream knows why."""
        call = self._call
        if call is None:
            return Lost("the connection was closed")
        hang_up = threading.Timer(_STATUS_S, call.cancel)
        hang_up.start()
        try:
            _next_of(call)
        except (Lost, ParamServerError) as known:
            is_told = isinstance(known, ParamServerError) or hang_up.is_alive()
            return known if is_told else Lost(f"the direct connection was lost: {error or 'closed'}")
        finally:
            hang_up.cancel()
        return Lost(f"the direct connection was lost: {error or 'closed'}")

    def receive_payload(
        self,
        first: Frame,
        num_bytes: int,
        write: Callable[[int, memoryview], None],
        segment: memoryview | None = None,
        targets: Callable[[int, int], Iterator[memoryview]] | None = None,
        leave: Callable[[int, int], object] | None = None,
    ) -> None:
        """The payload that `first` announces, handed to `write(offset, data)` piece by piece, from the
        connection or from the segment that its pieces are placed in; or received in `targets(offset, num_bytes)`.
        `leave(offset, num_bytes)` is told of what does not come because it is here already."""
        place = None
        if targets is not None and self._is_direct and self._direct is not None:
            direct = self._direct

            def place(offset: int, num_bytes: int) -> None:
                try:
                    with uninterrupted:
                        direct.receive_into(targets(offset, num_bytes))
                except (OSError, EOFError, ValueError) as error:
                    raise self._why_lost(error) from None

        if segment is not None:

            def place(offset: int, num_bytes: int) -> None:
                write(offset, segment[offset : offset + num_bytes])

        _collect(PayloadReader(num_bytes, write, place, leave), first, self.receive)

    def pull(self, averaged: bool, write: Callable[[int, memoryview], None], num_bytes: int | None = None) -> int:
        """Fetch weights beside the stream, piece by piece. Returns their version. Refuses them where they are not of
        `num_bytes`."""

        def begin(announced: int) -> Callable[[int, memoryview], None]:
            if num_bytes is not None and announced != num_bytes:
                what = f"{announced} bytes of weights, this model has {num_bytes}"
                raise refusal(Reason.BAD_REQUEST, f"the server sends {what}")
            return write

        return self._pull(pb.PullRequest(averaged=averaged), begin)

    def pull_to_evaluate(
        self, version: int | None, num_bytes: int, write: Callable[[int, memoryview], None]
    ) -> tuple[int, Layout]:
        """Fetch the weights to evaluate: the coordinator's newest, or what another shard keeps of the
        `version` that was. Their version and layout; nothing is written where they are not of `num_bytes`."""
        found: list[pb.Snapshot] = []

        def begin(announced: int) -> Callable[[int, memoryview], None]:
            return write if announced == num_bytes else lambda offset, data: None

        request = pb.PullRequest(keep=True) if version is None else pb.PullRequest(version=version)
        version = self._pull(request, begin, found.append)
        return version, layout_from_proto(found[0].tensors)

    def status(self) -> pb.StatusReply:
        """Where the run stands."""
        ask = self._channel.unary_unary(
            f"/{SERVICE}/Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.StatusReply.FromString,
        )
        try:
            reply = ask(pb.StatusRequest(), timeout=_STATUS_S, metadata=self._credentials.metadata)
        except grpc.RpcError as error:
            raise _translate(error) from None
        check_header(reply)
        return reply

    def heartbeat(self, heartbeats: Iterator[bytes]) -> Iterator[bool]:
        """Signs of life of a process that evaluates; after each whether the run is over."""
        heartbeat_replies = self._channel.stream_stream(
            f"/{SERVICE}/Heartbeat", response_deserializer=pb.HeartbeatReply.FromString
        )
        try:
            for heartbeat_reply in heartbeat_replies(heartbeats, metadata=self._credentials.metadata):
                yield heartbeat_reply.is_gone
        except (grpc.RpcError, ValueError) as error:  # the channel was closed
            raise Lost(f"{type(error).__name__}") from None

    def pull_optimizer(self, most_bytes: int) -> bytes:
        """What the server's optimizer remembers, as a safetensors file of at most so many bytes."""
        payload = bytearray()

        def begin(num_bytes: int) -> Callable[[int, memoryview], None]:
            if num_bytes > most_bytes:
                what = f"{num_bytes} bytes of an optimizer's state; of this model it has at most {most_bytes}"
                raise refusal(Reason.BAD_REQUEST, f"the server sends {what}")
            payload.extend(bytes(num_bytes))
            return lambda offset, data: payload.__setitem__(slice(offset, offset + len(data)), data)

        self._pull(pb.PullRequest(optimizer=True), begin)
        return bytes(payload)

    def _pull(
        self,
        request: pb.PullRequest,
        begin: Callable[[int], Callable[[int, memoryview], None]],
        announced: Callable[[pb.Snapshot], object] = lambda _: None,
    ) -> int:
        call = self._channel.unary_stream(f"/{SERVICE}/Pull", request_serializer=pb.PullRequest.SerializeToString)(
            request, metadata=self._credentials.metadata
        )
        with _Progress(call, _PULL_S, _PULL_PROGRESS_S) as progress:
            first = progress.next_of(self._limit)
            if first.kind != "snapshot":
                got = first.kind or "a piece of a payload"
                raise refusal(Reason.BAD_REQUEST, f"the server sent {got}, expected snapshot")
            snapshot = first.of(pb.Snapshot)
            check_header(snapshot)
            announced(snapshot)
            write = begin(snapshot.payload_bytes)
            _collect(PayloadReader(snapshot.payload_bytes, write), first, lambda: progress.next_of(self._limit))
        return snapshot.version

    def move(self, address: str) -> None:
        """The server is elsewhere now; a stream that there was is lost."""
        self._channel.close()
        self.address = address
        self._channel = self._open_channel()

    def shard_addresses(self, run: str) -> list[str]:
        """Of a coordinator's shards, as in its welcome."""
        (reply,) = self._ask([pb.RowsRequest(run=run)])()
        check_header(reply)
        return list(reply.shards)

    def pull_rows(
        self, run: str, rank: int, spec: TableSpec, table: int, ids: torch.Tensor
    ) -> Callable[[], list[pb.RowsReply]]:
        """Ask for rows of a table, beside the stream; what is returned waits for them, and raises as `receive`."""
        parts = [bytes(as_bytes(ids[here])) for here in chunks(0, len(ids), spec.row_bytes)]
        return self._ask([pb.RowsRequest(run=run, rank=rank, table=table, ids=part) for part in parts])

    def _ask(self, requests: list[pb.RowsRequest]) -> Callable[[], list[pb.RowsReply]]:
        ask = self._channel.unary_unary(
            f"/{SERVICE}/PullRows",
            request_serializer=pb.RowsRequest.SerializeToString,
            response_deserializer=pb.RowsReply.FromString,
        )
        calls = [ask.future(request, timeout=_PULL_S, metadata=self._credentials.metadata) for request in requests]

        def wait() -> list[pb.RowsReply]:
            try:
                return [call.result() for call in calls]
            except grpc.RpcError as error:
                raise _translate(error) from None
            except grpc.FutureCancelledError:
                raise Lost("the connection was closed") from None

        return wait

    def end_stream(self, timeout_s: float) -> None:
        """Half-close after what was sent, and wait for the server to agree; a lost server does not matter."""
        if self._call is None:
            return
        self._outgoing.put(None)
        if self._is_direct and self._direct is not None:
            self._direct.half_close()
        if self._is_reading:  # interrupted in the middle of an operation: the call is of no more use
            self.close_stream()
            return
        hang_up = threading.Timer(timeout_s, self._call.cancel)
        hang_up.start()
        try:
            for _ in self._call:
                pass  # a sign of life on its way
        except grpc.RpcError:
            pass
        finally:
            hang_up.cancel()
        self._call = None
        self._close_direct()

    def _close_direct(self) -> None:
        direct, self._direct, self._is_direct = self._direct, None, False
        if direct is not None:
            direct.close()

    def hang_up(self) -> None:
        """From any thread: end the stream, so that whoever reads it raises Lost."""
        if (call := self._call) is not None:
            call.cancel()
        if (direct := self._direct) is not None:
            direct.hang_up()

    def close_stream(self) -> None:
        """Drop the stream at once; the server sees the worker leave."""
        if self._call is not None:
            self._outgoing.put(None)
            self._call.cancel()
            self._call = None
        self._close_direct()

    def close(self) -> None:
        atexit.unregister(self.close)
        self.close_stream()
        self._channel.close()


def _drain(outgoing: queue.SimpleQueue[Iterable[bytes] | None], limit: Limit) -> Iterator[bytes]:
    while (frames := outgoing.get()) is not None:
        for raw in frames:
            yield raw
            limit.sent(len(raw))


class _Progress:
    """Ends a call that brings nothing for so long: before its first message, and between any two after it."""

    def __init__(self, call: Any, first_s: float, between_s: float) -> None:
        self._call = call
        self._between_s = between_s
        self._until = time.monotonic() + first_s
        self._is_over = threading.Event()
        self._is_late = False

    def __enter__(self) -> _Progress:
        threading.Thread(target=self._watch, name="pull", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def next_of(self, limit: Limit) -> Frame:
        """As `_next_of`. Raises Lost too where nothing came in time."""
        try:
            received = _next_of(self._call, limit)
        except Lost:
            if self._is_late:
                raise Lost(f"no more of the weights came for {self._between_s:g} s") from None
            raise
        self._until = time.monotonic() + self._between_s
        return received

    def _watch(self) -> None:
        while not self._is_over.wait(max(0.0, self._until - time.monotonic())):
            if time.monotonic() >= self._until:
                self._is_late = True
                self._call.cancel()
                return


def _next_of(call: Any, limit: Limit = NO_LIMIT) -> Frame:
    """The next message of a call. Raises Lost, or the refusal that ended it."""
    try:
        raw = next(call)
    except StopIteration:
        raise Lost("the server ended the stream") from None
    except grpc.RpcError as error:
        raise _translate(error) from None
    limit.received(len(raw))
    return parse(pb.ServerMessage, raw)


def _collect(reader: PayloadReader, first: Frame, receive: Callable[[], Frame]) -> None:
    """All of a payload, of which `first` announces it and may hold some."""
    reader.feed(first)
    while not reader.is_complete:
        piece = receive()
        if piece.kind is not None:
            raise refusal(Reason.BAD_REQUEST, f"the server sent {piece.kind} in the middle of a payload")
        reader.feed(piece)


def _translate(error: grpc.RpcError) -> Exception:
    refused: ParamServerError | None = refusal_from_status(error)
    if refused is not None and refused.reason not in _JOIN_AGAIN:
        return refused
    if refused is None and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UnreachableError(
            f"what replies at the server's address is no ps-server: it does not know {SERVICE}",
            fix="give the address that ps-server says it is listening on (--server HOST:PORT)",
        )
    return Lost(refused.message if refused is not None else f"{error.code().name}: {shown(error.details() or '', 500)}")
