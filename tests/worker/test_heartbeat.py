"""Replies to heartbeats, of a server that replies late."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import grpc
import pytest

from paramserver.common.security import PLAINTEXT
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.channel import GroupView, MemberHeartbeat

from .served import heartbeats, serve

INCARNATION = 7


class LateServer:
    """Replies to each heartbeat when it is given the reply, in their order."""

    def __init__(self) -> None:
        self.heartbeats: queue.SimpleQueue[pb.HeartbeatRequest] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[pb.HeartbeatReply] = queue.SimpleQueue()
        self._grpc, self.address = serve(Heartbeat=heartbeats(self._heartbeat))

    def _heartbeat(
        self, heartbeats: Iterator[pb.HeartbeatRequest], _: grpc.ServicerContext
    ) -> Iterator[pb.HeartbeatReply]:
        for heartbeat in heartbeats:
            self.heartbeats.put(heartbeat)
            yield self.replies.get()

    def stop(self) -> None:
        self.replies.put(pb.HeartbeatReply())
        self._grpc.stop(None)


@pytest.fixture
def server() -> Iterator[LateServer]:
    server = LateServer()
    yield server
    server.stop()


class Member:
    """A heartbeat whose replies a group view takes; `received` has them."""

    def __init__(self, server: LateServer) -> None:
        self.received: queue.SimpleQueue[pb.HeartbeatReply] = queue.SimpleQueue()
        self.view = GroupView()
        self.view.server_incarnation = INCARNATION
        self.heartbeat = MemberHeartbeat(lambda: server.address, PLAINTEXT, self._take)

    def _take(self, membership: int, reply: pb.HeartbeatReply) -> None:
        self.view.heartbeat_replied(membership, reply)
        self.received.put(reply)

    def join(self) -> None:
        self.view.membership = self.heartbeat.join(0.04)


@pytest.mark.parametrize(
    "late", [pb.HeartbeatReply(is_gone=True), pb.HeartbeatReply(over_generation=9)], ids=["gone", "generation"]
)
def test_a_late_reply_to_an_older_membership_does_not_end_the_newer_one(
    server: LateServer, late: pb.HeartbeatReply
) -> None:
    member = Member(server)
    late.server_incarnation = INCARNATION
    member.join()
    server.heartbeats.get(timeout=10)
    member.join()  # while the reply is under way
    server.replies.put(late)
    member.received.get(timeout=10)
    assert not member.view.is_over(9)
    while not member.view.is_over(9):  # until a reply to the newer one; a heartbeat of the older may be on its way
        server.heartbeats.get(timeout=10)
        server.replies.put(late)
        member.received.get(timeout=10)
    member.heartbeat.stop()
