"""Replies to heartbeats, of a server that replies late."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paramserver.common.security import PLAINTEXT
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.worker.conversation.exchange import Exchange
from paramserver.worker.conversation.heartbeat import Heartbeat
from paramserver.worker.session import Progress

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


def member(server: LateServer) -> tuple[Any, queue.SimpleQueue[pb.HeartbeatReply]]:
    """An exchange that joins whenever it is told to, and the heartbeat replies that it has taken."""
    told: queue.SimpleQueue[pb.HeartbeatReply] = queue.SimpleQueue()
    exchange: Any = Exchange.__new__(Exchange)
    welcome = SimpleNamespace(
        run="r", rank=0, incarnation=1, lease_s=0.04, shards=[], server_incarnation=INCARNATION,
        settings=SimpleNamespace(steps=1, pull_every=1),
    )  # fmt: skip
    exchange._welcome, exchange._shards = welcome, [SimpleNamespace(join=lambda *_: welcome)]
    exchange.progress, exchange._retry = Progress(rank=0, process="p"), SimpleNamespace(rank=0)
    exchange._addresses, exchange._join_message = [], lambda *_: None
    exchange._over = 0, 0, 0.0

    def taken(*reply: Any) -> None:
        exchange._heartbeat_replied(*reply)
        told.put(reply[-1])

    exchange._heartbeat = Heartbeat(server.address, PLAINTEXT, taken)
    return exchange, told


@pytest.mark.parametrize(
    "late", [pb.HeartbeatReply(is_gone=True), pb.HeartbeatReply(over_generation=9)], ids=["gone", "epoch"]
)
def test_a_late_reply_to_an_older_membership_does_not_end_the_newer_one(
    server: LateServer, late: pb.HeartbeatReply
) -> None:
    exchange, told = member(server)
    late.server_incarnation = INCARNATION
    exchange._join()
    server.heartbeats.get(timeout=10)
    exchange._join()  # while the reply is under way
    server.replies.put(late)
    told.get(timeout=10)
    assert not exchange.is_over(9)
    server.heartbeats.get(timeout=10)
    server.replies.put(late)  # to the newer one
    told.get(timeout=10)
    assert exchange.is_over(9)
    exchange._heartbeat.stop()


def test_a_reply_to_this_membership_counts(server: LateServer) -> None:
    exchange, told = member(server)
    exchange._join()
    for over in range(1, 5):
        server.heartbeats.get(timeout=10)
        server.replies.put(pb.HeartbeatReply(over_generation=over, server_incarnation=INCARNATION))
        told.get(timeout=10)
        assert exchange.is_over(over) and not exchange.is_over(over + 1)
    exchange._heartbeat.stop()
