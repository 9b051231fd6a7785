"""A worker's signs of life, on a connection of its own, from a thread of its own.

The connection has no keepalive: when the server stands still or the network does, it stays open, and the
server hears of this worker again as soon as it can. Only the end of the process closes it at once.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from ...common.security import Credentials
from ...common.wire.protocol import SERVICE
from ...proto import parameter_server_pb2 as pb
from .client import OPTIONS as CLIENT_OPTIONS
from .security import open_channel

# Beats in one lease: two may be lost.
_HEARTBEATS = 4
_TRY_AGAIN_S = 0.2
OPTIONS = [option for option in CLIENT_OPTIONS if not option[0].startswith(("grpc.keepalive_", "grpc.http2."))]


class Heartbeat:
    """Beats to the server at `address`, from `start` until `stop`. `told` gets each reply, on this thread, with the
    number of the membership whose heartbeat it replies to: a reply may come late, when the worker has joined again."""

    def __init__(
        self, address: str, credentials: Credentials, told: Callable[[int, pb.HeartbeatReply], object]
    ) -> None:
        self._address = address
        self._told = told
        self._credentials = credentials
        self.membership = 0  # counts calls of `start`
        self._heartbeat = self.membership, b""
        self._interval_s = 1.0
        self._stop = threading.Event()
        self._channel: grpc.Channel | None = None
        self._thread: threading.Thread | None = None
        atexit.register(self.stop)  # as the client does with its channel

    def start(self, heartbeat: bytes, lease_s: float) -> None:
        """Send `heartbeat` from now on, several times in every lease."""
        self.membership += 1
        self._heartbeat, self._interval_s = (self.membership, heartbeat), lease_s / _HEARTBEATS
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._stop.set()
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._channel is None:
                self._channel = open_channel(self._address, self._credentials.renewed(), OPTIONS)
            call = self._channel.stream_stream(
                f"/{SERVICE}/Heartbeat", response_deserializer=pb.HeartbeatReply.FromString
            )
            sent: deque[int] = deque()  # memberships of the heartbeats without a reply; the server replies in order
            try:
                replies = call(self._heartbeats(sent), metadata=self._credentials.metadata)
                for heartbeat_reply in replies:
                    if not sent:  # more replies than heartbeats: no server of ours
                        replies.cancel()
                        break
                    self._told(sent.popleft(), heartbeat_reply)
            except (grpc.RpcError, ValueError):  # the server is gone or not there yet; the channel was closed
                if self._credentials.ca is not None:  # the next one may need renewed certificates
                    self._channel.close()
                    self._channel = None
            self._stop.wait(_TRY_AGAIN_S)

    def _heartbeats(self, sent: deque[int]) -> Iterator[bytes]:
        while True:
            membership, heartbeat = self._heartbeat
            sent.append(membership)
            yield heartbeat
            if self._stop.wait(self._interval_s):
                return
