"""Heartbeats of a process to its server, on a separate connection and thread.

The connection has no keepalive. If the server or the network hangs, the connection stays open, and the server receives
the next heartbeat as soon as it can. Only the end of the process closes the connection at once.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from ...common.security import Credentials
from ...common.wire.protocol import SERVICE
from ...common.wire.records import GroupInfo
from ...proto import parameter_server_pb2 as pb
from ..ownership import at_exit, not_at_exit
from .channel import HEARTBEAT_OPTIONS, open_channel

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
                heartbeat += pb.HeartbeatRequest(metrics=pb.EvaluationMetrics(metrics=metrics)).SerializeToString()
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
