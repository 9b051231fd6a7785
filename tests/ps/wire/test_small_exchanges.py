"""Small contributions on a direct connection are taken and replied where they come; all else is left to the
conversation, as if it had just come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from paramserver.common.errors import ParamServerError, Reason, refusal
from paramserver.common.wire.direct import to_buffers
from paramserver.common.wire.frames import Frame
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core.effects import SendReply
from paramserver.ps.engine.folding import Go, Item, Peer
from paramserver.ps.wire.connection import Connection
from paramserver.ps.wire.conversation import SmallExchanges

from ...records import contribution_proto, reply_of

GO = Go(SendReply(0, 1, reply_of(1, 1), True), b"weights")


def message(item: Item) -> bytes | None:
    return item.payload if isinstance(item, Go) else b"waiting"


class Stage:
    """One worker's side, and what the run makes of contributions: `taken` says."""

    bytes_read = bytes_written = 0

    def __init__(self, taken: Callable[[Stage], bool] = lambda stage: True) -> None:
        ours, self.worker = socket.socketpair()
        self.worker.setblocking(False)
        ours.setblocking(False)
        self.connection, self.peer = Connection(ours), Peer(0, 1)
        self.num_taken = 0
        self._taken = taken
        self.is_stuck = False  # the message before has not left
        self.small = SmallExchanges(self.connection, self, self.peer, self, message)  # type: ignore[arg-type]
        self.other = asyncio.ensure_future(self.small.until_other())

    def take_now(self, received: Frame) -> bool:
        """As the receiver's."""
        if received.kind != "contribution":
            return False
        self.num_taken += 1
        return self._taken(self)

    def write_now(self, raw: bytes, is_counted: bool) -> bool:
        return not self.is_stuck and not self.connection.send_now(to_buffers(raw))

    def contribute(self, count: int = 1) -> None:
        message = pb.WorkerMessage(contribution=contribution_proto(1)).SerializeToString()
        self.worker.sendall(b"".join(map(bytes, to_buffers(message))) * count)

    def replies(self) -> int:
        try:
            return len(self.worker.recv(1 << 16)) // len(b"\x07\0\0\0weights")
        except BlockingIOError:
            return 0


def replied(stage: Stage) -> bool:
    stage.peer.say(GO)
    return True


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_each_gets_a_reply_and_one_that_came_too_early_after_it() -> None:
    stage = Stage(replied)
    stage.contribute(3)
    await until(lambda: stage.num_taken == 3)
    assert stage.replies() == 3 and not stage.other.done() and stage.peer.outbox.empty()

    later = Stage()
    later.contribute(2)
    await until(lambda: later.num_taken == 1)
    later.contribute()
    await asyncio.sleep(0.01)
    assert (later.num_taken, later.replies()) == (1, 0)  # the first is not replied yet
    later.peer.say("a reason to wait")
    later.peer.say(GO)
    await until(lambda: later.num_taken == 2)
    later.peer.say(GO)
    await until(lambda: later.num_taken == 3)


async def test_what_is_none_is_read_by_the_conversation() -> None:
    stage = Stage(replied)
    stage.contribute()
    stage.worker.sendall(b"".join(map(bytes, to_buffers(pb.WorkerMessage(leave={}).SerializeToString()))))
    assert await asyncio.wait_for(stage.other, 5) is False
    raw = await asyncio.wait_for(stage.connection.read(), 5)
    assert raw is not None and pb.WorkerMessage.FromString(raw).HasField("leave")

    stage = Stage()
    stage.worker.close()
    assert await asyncio.wait_for(stage.other, 5) is False


async def test_a_reply_that_cannot_be_said_at_once_is_the_conversations() -> None:
    for item in (GO, Go(GO.effect)):  # the connection is full; weights that are no small message
        stage = Stage()
        stage.contribute()
        await until(lambda stage=stage: stage.num_taken)
        stage.is_stuck = item.payload is not None
        stage.peer.say(item)
        assert await asyncio.wait_for(stage.other, 5) is True
        assert stage.peer.outbox.get_nowait() is item


async def test_what_goes_wrong_is_the_conversations() -> None:
    def refuse(stage: Stage) -> bool:
        raise refusal(Reason.BAD_REQUEST, "num_samples is 0")

    for data, why in ((b"", "num_samples"), (b"\xff\xff\xff\xff", "at most 8388608 are possible")):
        stage = Stage(refuse)
        stage.worker.sendall(data) if data else stage.contribute()
        with pytest.raises(ParamServerError, match=why):
            await asyncio.wait_for(stage.other, 5)
        assert stage.peer.at_once is None


async def test_it_is_woken_by_a_small_message_after_a_large_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        worker = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    ours.setblocking(False)
    connection = Connection(ours)
    large = bytearray(4 << 20)
    receiving = asyncio.ensure_future(connection.receive_into(memoryview(large)))
    await asyncio.to_thread(worker.sendall, large)
    assert await asyncio.wait_for(receiving, 5)
    connection.wake_for(1 << 20)  # as it may be left
    woken: list[bool] = []
    connection.watch(lambda: woken.append(True))
    worker.sendall(b"x")
    await until(lambda: woken)
    connection.close()
    worker.close()
