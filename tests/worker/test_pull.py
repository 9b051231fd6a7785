"""A pull of a whole model ends when nothing more comes, and not because it takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from paramserver.common.security import PLAINTEXT
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.wire.frames import message_frames
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.shards import link
from paramserver.worker.conversation import channel
from paramserver.worker.conversation.channel import Channel, Lost

from .served import serve

BETWEEN_S, LIMIT_S, NUM_PIECES, PIECE = 0.25, 1.0, 6, 1 << 20
LAYOUT = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (NUM_PIECES * PIECE // 4,))])


@pytest.fixture
def served() -> Iterator[Callable[[int], str]]:
    """The address of a server whose weights come in pieces with a pause before each; after so many it is silent."""
    servers, end = [], threading.Event()

    def start(num_pieces: int) -> str:
        def pull(request: bytes, context: Any) -> Iterator[bytes]:
            header = pb.ServerMessage(snapshot=pb.Snapshot(version=3, payload_bytes=NUM_PIECES * PIECE))
            for number, raw in enumerate(message_frames(header, [memoryview(bytes(NUM_PIECES * PIECE))])):
                end.wait(BETWEEN_S if number < num_pieces else 60)
                yield bytes(raw)

        server, address = serve(Pull=grpc.unary_stream_rpc_method_handler(pull))
        servers.append(server)
        return address

    yield start
    end.set()
    for server in servers:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull takes longer than the limit; no two pieces are as far apart."""
    assert NUM_PIECES * BETWEEN_S > LIMIT_S
    for module, name in ((channel, "_PULL_S"), (channel, "_PULL_PROGRESS_S"), (link, "_FIRST_S"),
                         (link, "_PROGRESS_S"), (link, "_TIMEOUT_S")):  # fmt: skip
        monkeypatch.setattr(module, name, LIMIT_S, raising=False)


def by_worker(address: str) -> int:
    return Channel(address).pull(lambda _: lambda offset, data: None).version


def by_coordinator(address: str) -> int:
    found = asyncio.run(link._pull(address, PLAINTEXT, LAYOUT, pb.PullRequest()))
    return 3 if found["w"].shape == (NUM_PIECES * PIECE // 4,) else 0


@pytest.mark.parametrize(
    ("pull", "error", "message"),
    [(by_worker, Lost, "no more of the weights came for 1 s"), (by_coordinator, TimeoutError, None)],
)
def test_weights_that_keep_coming_are_waited_for_and_a_silent_server_is_left(
    served: Callable[[int], str], pull: Callable[[str], int], error: type[Exception], message: str | None
) -> None:
    assert pull(served(99)) == 3
    with pytest.raises(error, match=message):
        pull(served(2))
