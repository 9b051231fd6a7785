"""Replies to heartbeats, of a server that replies late."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from paramserver.common.security import PLAINTEXT
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.heartbeat import GroupView, MemberHeartbeat

INCARNATION = 7


class LateServer:
    """Replies to each heartbeat when it is given the reply, in their order."""

    def __init__(self) -> None:
        self.heartbeats: queue.SimpleQueue[pb.HeartbeatRequest] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[pb.HeartbeatReply] = queue.SimpleQueue()
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.stream_stream_rpc_method_handler(
            self._heartbeat, pb.HeartbeatRequest.FromString, pb.HeartbeatReply.SerializeToString
        )
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Heartbeat": handler}),))
        self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()

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
    server.heartbeats.get(timeout=10)
    server.replies.put(late)  # to the newer one
    member.received.get(timeout=10)
    assert member.view.is_over(9)
    member.heartbeat.stop()


def test_a_reply_to_this_membership_counts(server: LateServer) -> None:
    member = Member(server)
    member.join()
    for over in range(1, 5):
        server.heartbeats.get(timeout=10)
        server.replies.put(pb.HeartbeatReply(over_generation=over, server_incarnation=INCARNATION))
        member.received.get(timeout=10)
        assert member.view.is_over(over) and not member.view.is_over(over + 1)
    member.heartbeat.stop()
