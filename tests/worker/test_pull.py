"""A pull of a whole model ends when nothing more comes, and not because it takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from paramserver.common.security import PLAINTEXT
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.wire.frames import message_frames
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.shards import gather
from paramserver.worker.conversation import channel
from paramserver.worker.conversation.channel import Channel, Lost

BETWEEN_S, LIMIT_S, NUM_PIECES, PIECE = 0.25, 1.0, 6, 1 << 20
LAYOUT = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (NUM_PIECES * PIECE // 4,))])


@pytest.fixture
def served() -> Iterator[Callable[[int], str]]:
    """The address of a server whose weights come in pieces with a pause before each; after so many it is silent."""
    servers, end = [], threading.Event()

    def serve(num_pieces: int) -> str:
        def pull(request: bytes, context: Any) -> Iterator[bytes]:
            header = pb.ServerMessage(snapshot=pb.Snapshot(version=3, payload_bytes=NUM_PIECES * PIECE))
            for number, raw in enumerate(message_frames(header, [memoryview(bytes(NUM_PIECES * PIECE))])):
                end.wait(BETWEEN_S if number < num_pieces else 60)
                yield bytes(raw)

        server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.unary_stream_rpc_method_handler(pull)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Pull": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield serve
    end.set()
    for server in servers:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull takes longer than the limit; no two pieces are as far apart."""
    assert NUM_PIECES * BETWEEN_S > LIMIT_S
    for module, name in ((channel, "_PULL_S"), (channel, "_PULL_PROGRESS_S"), (gather, "_FIRST_S"),
                         (gather, "_PROGRESS_S"), (gather, "_TIMEOUT_S")):  # fmt: skip
        monkeypatch.setattr(module, name, LIMIT_S, raising=False)


def test_a_worker_waits_for_weights_that_keep_coming(served: Callable[[int], str]) -> None:
    assert Channel(served(99)).pull(lambda _: lambda offset, data: None).version == 3


def test_a_worker_leaves_a_server_that_has_stopped_sending(served: Callable[[int], str]) -> None:
    with pytest.raises(Lost, match="no more of the weights came for 1 s"):
        Channel(served(2)).pull(lambda _: lambda offset, data: None)


def test_a_coordinator_waits_for_a_shards_part_that_keeps_coming(served: Callable[[int], str]) -> None:
    found = asyncio.run(gather._pull(served(99), PLAINTEXT, LAYOUT, pb.PullRequest()))
    assert found["w"].shape == (NUM_PIECES * PIECE // 4,)


def test_a_coordinator_leaves_a_shard_that_has_stopped_sending(served: Callable[[int], str]) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(gather._pull(served(2), PLAINTEXT, LAYOUT, pb.PullRequest()))
