"""A gRPC channel to one server process, the errors of its calls, and heartbeats.

A failed connection raises `Lost`. A refusal by the server raises the error for its reason.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ...common.config.addresses import is_loopback, split_address
from ...common.config.schema import Config
from ...common.errors import AuthError, ParamServerError, Reason, UnreachableError, bad_request, shown
from ...common.proxies import proxy_hint, proxy_options
from ...common.reporting.log import get_logger
from ...common.security import PLAINTEXT, Credentials, diagnose, warn_of_readable_secrets
from ...common.wire.checks import check_header
from ...common.wire.frames import MAX_MESSAGE_BYTES, Frame, PayloadReader, parse
from ...common.wire.protocol import OTHER_PROTOCOL, SERVICE, refusal_from_status
from ...common.wire.records import GroupInfo
from ...proto import parameter_server_pb2 as pb
from ..ownership import at_exit, not_at_exit
from ..session import Retry
from ..transports.limit import NO_LIMIT, Limit
from .threads import sleep

log = get_logger()

HEARTBEAT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # If an address does not reply, gRPC tries to connect for 20 s. Its own back-off grows to two minutes.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Every worker process gets its own connection.
    ("grpc.use_local_subchannel_pool", 1),
)
OPTIONS = (*HEARTBEAT_OPTIONS, ("grpc.keepalive_time_ms", 2000), ("grpc.http2.max_pings_without_data", 0))

# Time that a ping waits for its reply, in ms. Keepalive alone notices a frozen peer after 61 s; with the shortest ping
# time it takes 3 to 4 s. But a ping queues behind earlier data: 4 MB at 10 Mbit/s take 3 s, so a contribution would
# never arrive. After a connection was lost for this reason, the next one waits twice as long.
_LEAST_PING_MS, _MOST_PING_MS = 2000, 16_000
_UNANSWERED = ("ping timeout", "timed out")  # by gRPC, and by the kernel, for which gRPC sets the same limit

# Pulls have no total limit, because 1 GB at 25 Mbit/s takes 320 s. This one is for the first message, which waits for
# the pulls of other workers.
_PULL_S = 300.0
_PULL_PROGRESS_S = 60.0  # between two messages of 1 MiB, which is 140 kbit/s
_STATUS_S = 2.0

Write = Callable[[int, memoryview], None]
Received = TypeVar("Received", bound=Message)

_SERIALIZE = methodcaller("SerializeToString")
_HEALTH = "/grpc.health.v1.Health/Check"

# After these refusals the same process may join again.
_JOIN_AGAIN = (Reason.NOT_JOINED, Reason.DRAINING, Reason.NOT_READY, Reason.TOO_SLOW)


class Lost(Exception):
    """The connection failed or could not be made. The text is gRPC's."""


def wait_for_server(retry: Retry, lost: Lost) -> None:
    """Wait until the next attempt. Logs the address the first time. Raises UnreachableError after the give-up time."""
    delay_s, reason = retry.failed(time.monotonic(), str(lost)), str(lost)
    if retry.num_failures == 1:
        log.info("waiting_for_server", address=retry.address, reason=reason, gives_up_in_s=retry.give_up_s)
    sleep(delay_s)


class Channel:
    """A gRPC channel that is opened again for renewed certificates, a longer ping time, or another server address.

    `addresses`: HOST:PORT[,HOST:PORT], where the server may be. They are tried in turn. `address` is the current one.
    Calls raise Lost, or the refusal of the server.
    """

    def __init__(self, addresses: str, credentials: Credentials = PLAINTEXT, limit: Limit = NO_LIMIT) -> None:
        self._addresses = addresses.split(",")
        self.address, self.credentials, self.limit = self._addresses[0], credentials, limit
        self._ping_ms = _LEAST_PING_MS
        self._channel = self._open()
        # If a channel is open when the interpreter exits, gRPC waits for a thread that no longer exists.
        at_exit(self.close)

    def _open(self) -> grpc.Channel:
        pings = [(f"grpc.{name}_ms", self._ping_ms) for name in ("keepalive_timeout", "http2.ping_timeout")]
        return open_channel(self.address, self.credentials, (*OPTIONS, *pings))

    def _open_again(self) -> None:
        self._channel.close()
        self._channel = self._open()

    def connect(self, timeout_s: float) -> None:
        """Connect. Raises Lost if the server does not reply within `timeout_s`.

        Wrong TLS settings on either side raise AuthError at once. Another service at the address raises
        UnreachableError.
        """
        # Any reply shows that the channel is connected. gRPC's own watch of a channel has a thread, which prints a
        # traceback if the channel is closed meanwhile.
        check, cause, deadline = self._channel.unary_unary(_HEALTH), "", time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                check(b"", timeout=left_s, wait_for_ready=bool(cause))
                return
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    break
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return
            except ValueError:  # another thread has closed the channel
                break
            cause = cause or self._cause()
        cause = (cause or "no reply") + proxy_hint(self.address)
        self.turn()
        raise Lost(cause)

    def _cause(self) -> str:
        """Why the connection failed. Uses renewed certificates, or raises the error for a wrong setting."""
        renewed = self.credentials.renewed()
        if renewed != self.credentials:
            self.credentials = renewed
            self._open_again()
            raise Lost("the certificates were renewed")
        try:
            mistake = diagnose(self.address, renewed)
        except OSError as error:
            return (error.strerror or str(error) or "no reply").lower()
        if mistake is not None:
            raise mistake
        return "no reply"

    def method(self, kind: str, name: str, **serializers: Any) -> Any:
        """gRPC's callable for a method of the service; `kind` is gRPC's, such as unary_unary."""
        return getattr(self._channel, kind)(f"/{SERVICE}/{name}", **serializers)

    def wait_longer(self, lost: Lost) -> None:
        """After a stream without a ping reply, give the next connection a longer ping time."""
        if any(text in str(lost) for text in _UNANSWERED) and self._ping_ms < _MOST_PING_MS:
            self._ping_ms *= 2
            self._open_again()

    def turn(self) -> None:
        """After a failed attempt, continue with the next address, if there are several."""
        if len(self._addresses) > 1:
            self._addresses.append(self._addresses.pop(0))
            self.move(self._addresses[0])

    def move(self, address: str) -> None:
        """Connect to the server's new address. A stream to the old address is lost."""
        self.address = address
        self._open_again()

    def close(self) -> None:
        not_at_exit(self.close)
        self._channel.close()

    # ---- single calls, beside the stream --------------------------------------------------------

    def status(self) -> pb.StatusReply:
        """The run's status."""
        (reply,) = self.ask("Status", [pb.StatusRequest()], pb.StatusReply, _STATUS_S)()
        return reply

    def pull(self, begin: Callable[[pb.Snapshot], Write], **which: Any) -> pb.Snapshot:
        """Fetch what the fields of PullRequest name, piece by piece.

        `begin` gets the announcement. It refuses the payload, or returns the function that writes a piece.
        """
        pull = self.method("unary_stream", "Pull", request_serializer=_SERIALIZE)
        call = pull(pb.PullRequest(**which), metadata=self.credentials.metadata)
        until, is_over = time.monotonic() + _PULL_S, threading.Event()

        def watch() -> None:
            while not is_over.wait(max(0.0, until - time.monotonic())):
                if time.monotonic() >= until:
                    call.cancel()
                    return

        def receive() -> Frame:
            nonlocal until
            try:
                received = next_frame(call, self.limit)
            except Lost:
                if time.monotonic() >= until:
                    raise Lost(f"no more of the weights came for {_PULL_PROGRESS_S:g} s") from None
                raise
            until = time.monotonic() + _PULL_PROGRESS_S
            return received

        threading.Thread(target=watch, name="pull", daemon=True).start()
        try:
            first = receive()
            if first.kind != "snapshot":
                got = first.kind or "a piece of a payload"
                raise bad_request(f"the server sent {got}, expected snapshot")
            snapshot = first.of(pb.Snapshot)
            check_header(snapshot)
            collect(PayloadReader(snapshot.payload_bytes, begin(snapshot)), first, receive)
        finally:
            is_over.set()
        return snapshot

    def pull_optimizer(self, most_bytes: int) -> bytes:
        """Fetch the state of the server's optimizer, as a safetensors file of at most `most_bytes`."""
        payload = bytearray()

        def begin(snapshot: pb.Snapshot) -> Write:
            if (num_bytes := snapshot.payload_bytes) > most_bytes:
                description = f"{num_bytes} bytes of an optimizer's state; of this model it has at most {most_bytes}"
                raise bad_request(f"the server sends {description}")
            payload.extend(bytes(num_bytes))
            return lambda offset, data: payload.__setitem__(slice(offset, offset + len(data)), data)

        self.pull(begin, optimizer=True)
        return bytes(payload)

    def shard_addresses(self, run: str) -> list[str]:
        """The addresses of a coordinator's shards, as in its Welcome."""
        (reply,) = self.ask("PullRows", [pb.RowsRequest(run=run)], pb.RowsReply)()
        return list(reply.shards)

    def ask(
        self, name: str, requests: Sequence[Message], reply: type[Received], timeout_s: float = _PULL_S
    ) -> Callable[[], list[Received]]:
        """Start a call of this method for each of these requests. The returned function waits for their replies."""
        call = self.method("unary_unary", name, request_serializer=_SERIALIZE, response_deserializer=reply.FromString)
        calls = [call.future(item, timeout=timeout_s, metadata=self.credentials.metadata) for item in requests]

        def wait() -> list[Received]:
            try:
                replies = [call.result() for call in calls]
            except grpc.RpcError as error:
                raise translated(error) from None
            except grpc.FutureCancelledError:
                raise Lost("the connection was closed") from None
            for item in replies:
                check_header(item)
            return replies

        return wait


def open_channel(address: str, credentials: Credentials, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """Open a channel to `address`, with TLS if there is a CA. Calls pass the token in `credentials.metadata`."""
    if credentials.ca is None:
        return grpc.insecure_channel(address, options=(*options, *proxy_options(address)))
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.cert)
    return grpc.secure_channel(address, tls, options=(*options, *proxy_options(address)))


def next_frame(call: Any, limit: Limit = NO_LIMIT) -> Frame:
    """Receive the next message of a call. Raises Lost, or the refusal that ended the call."""
    try:
        raw = next(call)
    except StopIteration:
        raise Lost("the server ended the stream") from None
    except grpc.RpcError as error:
        raise translated(error) from None
    if limit.at_once:
        limit.passed("down", len(raw))
    return parse(pb.ServerMessage, raw)


def collect(reader: PayloadReader, first: Frame, receive: Callable[[], Frame]) -> None:
    """Receive a complete payload. `first` announces it and may contain its first bytes."""
    reader.feed(first)
    while not reader.is_complete:
        piece = receive()
        if piece.kind is not None:
            raise bad_request(f"the server sent {piece.kind} in the middle of a payload")
        reader.feed(piece)


def translated(error: grpc.RpcError) -> Exception:
    refused: ParamServerError | None = refusal_from_status(error)
    if refused is not None and refused.reason not in _JOIN_AGAIN:
        return refused
    if refused is None and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        if (error.details() or "").startswith(OTHER_PROTOCOL):
            return UnreachableError(shown(error.details() or "", 500), fix="install one version on all hosts")
        return UnreachableError(
            f"the process at the server's address is not a ps-server: it does not know {SERVICE}",
            fix="give the address that ps-server listens on (--server HOST:PORT)",
        )
    return Lost(refused.message if refused is not None else f"{error.code().name}: {shown(error.details() or '', 500)}")


# ---- heartbeat -----------------------------------------------------------------------------------
# Heartbeats of a process to its server, on a separate connection and thread.
#
# The connection has no keepalive. If the server or the network hangs, the connection stays open, and the server
# receives the next heartbeat as soon as it can. Only the end of the process closes the connection at once.


_HEARTBEATS = 4  # in one lease; two may be lost
_TRY_AGAIN_S = 0.2


class Heartbeat:
    """Sends heartbeats to the server, whose address `address` returns, from `start` until `stop`.

    `heartbeats` returns the messages of one call, each with a tag. `on_reply` is called on this thread with the tag of
    each heartbeat and its reply.
    """

    def __init__(
        self,
        address: Callable[[], str],
        credentials: Credentials,
        heartbeats: Callable[[], Iterator[tuple[Any, bytes]]],
        on_reply: Callable[[Any, pb.HeartbeatReply], object],
    ) -> None:
        self._address, self._credentials = address, credentials
        self._heartbeats, self._on_reply = heartbeats, on_reply
        self._stop = threading.Event()
        self._channel: grpc.Channel | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        at_exit(self.stop)  # at exit, gRPC would wait for a thread that no longer exists

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        not_at_exit(self.stop)
        self._stop.set()
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._channel is None:
                address = self._address()
                self._channel = open_channel(address, self._credentials.renewed(), HEARTBEAT_OPTIONS)
            call = self._channel.stream_stream(
                f"/{SERVICE}/Heartbeat", response_deserializer=pb.HeartbeatReply.FromString
            )
            sent: deque[Any] = deque()  # tags of heartbeats without a reply, in the order in which the server replies
            try:
                replies = call(self._noted(sent), metadata=self._credentials.metadata)
                for heartbeat_reply in replies:
                    if not sent:  # more replies than heartbeats: not a ps-server
                        replies.cancel()
                        break
                    self._on_reply(sent.popleft(), heartbeat_reply)
            except (grpc.RpcError, ValueError):  # the server is gone or not there yet, or the channel was closed
                # The next connection may need renewed certificates, or the server's other address.
                if self._credentials.ca is not None or self._address() != address:
                    self._channel.close()
                    self._channel = None
            self._stop.wait(_TRY_AGAIN_S)

    def _noted(self, sent: deque[Any]) -> Iterator[bytes]:
        for tag, heartbeat in self._heartbeats():
            sent.append(tag)
            yield heartbeat


class MemberHeartbeat(Heartbeat):
    """A worker's heartbeats, several per lease. The tag of each is the number of the membership that sent it.

    A reply may arrive after a new join, so the number can be that of an earlier membership.
    """

    def __init__(
        self, address: Callable[[], str], credentials: Credentials, on_reply: Callable[[int, pb.HeartbeatReply], object]
    ) -> None:
        super().__init__(address, credentials, self._of_member, on_reply)
        self._newest = 0, b""  # number of calls of `join`, and the message
        self._interval_s = 1.0
        self.measure: Callable[[], Mapping[str, float]] = dict  # what this process measures, for displays

    def join(self, lease_s: float, **fields: Any) -> int:
        """Send a HeartbeatRequest with these fields from now on. Returns the number of this membership."""
        membership = self._newest[0] + 1
        self._newest = membership, pb.HeartbeatRequest(**fields).SerializeToString()
        self._interval_s = lease_s / _HEARTBEATS
        if membership == 1:
            self.start()
        return membership

    def _of_member(self) -> Iterator[tuple[int, bytes]]:
        while True:
            membership, heartbeat = self._newest
            if metrics := self.measure():  # messages of protobuf that follow one another are one message
                heartbeat += pb.HeartbeatRequest(metrics=pb.Metrics(metrics=metrics)).SerializeToString()
            yield membership, heartbeat
            if self._stop.wait(self._interval_s):
                return


class GroupView:
    """The newest facts about all-reduce peers.

    `info` comes with the newest reply. `rendezvous` is this worker's address for peers, which the model message
    contains.
    """

    def __init__(self) -> None:
        self.info = GroupInfo()
        self.rendezvous = ""
        self.server_incarnation = 0
        # from the newest heartbeat reply: membership, server incarnation, newest generation that is over
        self._over = 0, 0, 0.0
        self.membership = 0  # the current one; only replies to its heartbeats are used

    def heartbeat_replied(self, membership: int, reply: pb.HeartbeatReply) -> None:
        """Called on the heartbeat's thread."""
        self._over = membership, reply.server_incarnation, math.inf if reply.is_gone else reply.over_generation

    def is_over(self, generation: int) -> bool:
        """Whether the server has released a member of this generation, or this worker."""
        membership, incarnation, over = self._over
        return (membership, incarnation) == (self.membership, self.server_incarnation) and generation <= over


# ---- security ------------------------------------------------------------------------------------
# The worker's credentials.
#
# A token is never sent unencrypted to another machine, unless `server.insecure` says that the network is trusted.


def worker_credentials(config: Config) -> Credentials:
    """Read the credentials from the settings and PS_TOKEN.

    Raises AuthError for unusable files, and for a token that would be sent unencrypted.
    """
    security, addresses = config.security, config.worker.server
    if security.cert is not None and security.ca is None:
        message = "security.cert is set without security.ca: the worker uses TLS only if it knows whom to trust"
        raise AuthError(message, fix="add --ca FILE: ca.crt of ps-certs init")
    warn_of_readable_secrets(security)
    credentials = Credentials.read(security)
    is_here = all(is_loopback(split_address(address)[0]) for address in addresses.split(","))
    if credentials.token is not None and security.ca is None and not config.server.insecure and not is_here:
        raise AuthError(
            f"the token would be sent to {addresses} unencrypted, where others may read it",
            fix="use TLS: --ca FILE (ca.crt of ps-certs init); or on a network you trust --set server.insecure=true",
        )
    return replace(credentials, trusts_network=config.server.insecure)


def check_plaintext(host: str, who: str, trusts_network: bool, fix: str) -> None:
    """Raises AuthError if other machines can reach `host`, where `who` would listen for torch's own connections."""
    if trusts_network or is_loopback(host):
        return
    raise AuthError(
        f"{who} would exchange tensors on {host}, which other machines can reach, unencrypted: torch's Gloo and NCCL "
        "have neither TLS nor a check of the peer",
        fix=f"on a network you trust (a private one, or a tunnel such as WireGuard) add --insecure; {fix}",
    )
