"""A worker's heartbeats, on a separate connection and thread.

The connection has no keepalive. If the server or the network hangs, the connection stays open, and the server receives
the next heartbeat as soon as it can. Only the end of the process closes the connection at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import grpc

from ...common.security import Credentials
from ...common.wire.protocol import SERVICE
from ...proto import parameter_server_pb2 as pb
from ..ownership import at_exit, not_at_exit
from .channel import HEARTBEAT_OPTIONS, open_channel

_HEARTBEATS = 4  # in one lease; two may be lost
_TRY_AGAIN_S = 0.2


class Heartbeat:
    """Sends heartbeats to the server, whose address `address` returns, from `start` until `stop`.

    `on_reply` is called on this thread with each reply and the number of the membership that sent the heartbeat. A
    reply may arrive after a new join, so the number can be that of an earlier membership.
    """

    def __init__(
        self, address: Callable[[], str], credentials: Credentials, on_reply: Callable[[int, pb.HeartbeatReply], object]
    ) -> None:
        self._address, self._credentials, self._on_reply = address, credentials, on_reply
        self._heartbeat = 0, b""  # number of calls of `start`, and the message
        self._interval_s = 1.0
        self.measure: Callable[[], Mapping[str, float]] = dict  # what this process measures, for displays
        self._stop = threading.Event()
        self._channel: grpc.Channel | None = None
        self._thread: threading.Thread | None = None
        at_exit(self.stop)  # at exit, gRPC would wait for a thread that no longer exists

    def start(self, heartbeat: bytes, lease_s: float) -> int:
        """Send `heartbeat` from now on, several times per lease. Returns the number of this membership."""
        membership = self._heartbeat[0] + 1
        self._heartbeat, self._interval_s = (membership, heartbeat), lease_s / _HEARTBEATS
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
        return membership

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
            # memberships of heartbeats without a reply, in the order in which the server replies
            sent: deque[int] = deque()
            try:
                replies = call(self._heartbeats(sent), metadata=self._credentials.metadata)
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

    def _heartbeats(self, sent: deque[int]) -> Iterator[bytes]:
        while True:
            membership, heartbeat = self._heartbeat
            sent.append(membership)
            if metrics := self.measure():  # messages of protobuf that follow one another are one message
                heartbeat += pb.HeartbeatRequest(metrics=pb.EvaluationMetrics(metrics=metrics)).SerializeToString()
            yield heartbeat
            if self._stop.wait(self._interval_s):
                return
