"""Plays many workers in one process: real conversations on asyncio streams, and little else.

Each rank has a connection and a rank of its own and says what a worker says: Join, Model, InitialWeights
when asked, contributions with real payloads, Leave. It computes nothing between them: payloads are made
once, replies are read for what the next contribution needs, weights are left where they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from ...common.errors import ParamServerError
from ...common.tensors.optimizers import OptimizerSpec, describe_optimizers, find_optimizer
from ...common.wire.direct import ACCEPTED, HELLO, LENGTH_BYTES, to_buffers
from ...common.wire.frames import MAX_MESSAGE_BYTES, Frame, message_frames, parse
from ...common.wire.messages import contribution_message, read_reply
from ...common.wire.protocol import SERVICE
from ...common.wire.records import Base, Contribution, ContributionId, PayloadInfo
from ...worker.conversation import messages
from ...worker.session import Progress
from ...worker.tensors.transfer import ModelTensors
from ..output.machine import cpu_seconds
from .model import synthetic_model
from .turns import Measured, Samples

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each worker, as in real ones
)
_WARMUP_S = 0.5
_JOIN_S = 60.0
_LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class SwarmOptions:
    """`ranks` of the run at `address` that this process plays, for `seconds`; `pace_s`: so long from the beginning of
    one exchange to that of the next, where that can be had; none: one after another."""

    address: str
    server_pid: int
    floats: int
    optimizer: str
    seconds: float
    transport: str = "grpc"
    pace_s: float = 0.0


class Payloads:
    """The payload of all ranks, made once. It is zero, which costs the server as much as any other."""

    def __init__(self, floats: int, optimizer: str) -> None:
        module = synthetic_model(floats)
        model = ModelTensors(module)
        cls: Any = find_optimizer(optimizer)
        self.spec: OptimizerSpec = describe_optimizers([cls(module.parameters(), lr=_LEARNING_RATE)], model.names)
        self.layout = model.layout
        self.weights = [memoryview(bytes(self.layout.total_bytes))]
        self.gradient = [memoryview(bytes(self.layout.exchange_bytes))]


class DirectCall(asyncio.Protocol):
    """A direct connection where Player has a call; `stream` is the one it belongs to."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._came = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self._is_closed = False

    @classmethod
    async def opened(cls, stream: Any, host: str, offered: messages.pb.Direct) -> DirectCall:
        _, call = await asyncio.get_running_loop().create_connection(lambda: cls(stream), host, offered.port)
        call._transport.write(HELLO + offered.ticket)
        await call._until(len(ACCEPTED))
        del call._came[: len(ACCEPTED)]
        return call

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        self.data_received(b"")

    async def _until(self, num_bytes: int) -> bool:
        while len(self._came) < num_bytes and not self._is_closed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return len(self._came) >= num_bytes

    async def read(self) -> Any:
        """Read a message with its payload."""
        if not await self._until(LENGTH_BYTES):
            return await self.stream.read()
        end = LENGTH_BYTES + int.from_bytes(self._came[:LENGTH_BYTES], "little")
        await self._until(end)
        message, self._came = bytes(self._came[LENGTH_BYTES:end]), self._came[end:]
        if num_bytes := parse(messages.pb.ServerMessage, message).out_of_band:
            await self._until(num_bytes)
            self._came = self._came[num_bytes:]
        return message

    async def write(self, raw: bytes) -> None:
        self._transport.writelines(to_buffers(raw))

    async def done_writing(self) -> None:
        self._transport.write_eof()
        await self.stream.done_writing()

    async def details(self) -> str:
        return str(await self.stream.details())


class Player:
    """One rank on its stream."""

    def __init__(self, channel: grpc.aio.Channel, rank: int, payloads: Payloads, options: SwarmOptions) -> None:
        self._is_direct, self._host = options.transport == "direct", options.address.rpartition(":")[0]
        self._pace_s = options.pace_s
        self.num_exchanges = 0
        self._call: Any = channel.stream_stream(f"/{SERVICE}/Exchange")()
        self._progress = Progress(rank=rank)
        self._payloads = payloads

    async def join(self) -> None:
        """Join, and wait for the first weights."""
        await self._send(messages.message(join=messages.join_message(self._progress, "cpu", {})))
        welcome = (await self._receive("welcome")).of(messages.Welcome)
        self._progress.welcomed(welcome.run, welcome.rank, welcome.incarnation)
        model = messages.model_message(self._payloads.layout, self._payloads.spec, "raw", "raw")
        model.direct = self._is_direct
        direct = await DirectCall.opened(self._call, self._host, welcome.direct) if self._is_direct else None
        await self._send(messages.message(model=model))
        self._call = direct or self._call
        received = await self._receive("reply", "send_weights")
        if received.kind == "send_weights":
            header = messages.pb.InitialWeights(payload_bytes=self._payloads.layout.total_bytes)
            await self._send(message_frames(messages.pb.WorkerMessage(initial_weights=header), self._payloads.weights))
            received = await self._receive("reply")
        await self._take(received)

    async def exchange_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over() and not self._progress.is_done:
            num_bytes = self._payloads.layout.exchange_bytes
            contribution = Contribution(
                ContributionId(self._progress.rank or 0, self._progress.incarnation, self._progress.next_number),
                base=Base(self._progress.version),
                payload=PayloadInfo("raw", num_bytes),
            )
            header = contribution_message(contribution)
            await self._send(message_frames(header, self._payloads.gradient))
            began = time.perf_counter()
            await self._take(await self._receive("reply"))
            self.num_exchanges += 1
            if self._pace_s:
                await asyncio.sleep(max(0.0, began + self._pace_s - time.perf_counter()))

    async def leave(self) -> None:
        await self._send(messages.message(leave={}))
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass

    async def _take(self, received: Frame) -> None:
        """Read a reply and its weights, without using them."""
        reply = read_reply(received.of(messages.pb.Reply))
        left = (reply.weights.num_bytes if reply.weights is not None else 0) - len(received.data) - received.out_of_band
        while left > 0:
            piece = await self._receive(None)
            left -= len(piece.data) + piece.out_of_band
        self._progress.replied(reply)

    async def _send(self, frames: Any) -> None:
        for frame in frames:
            await self._call.write(frame)

    async def _receive(self, *kinds: str | None) -> Frame:
        while True:
            raw = await self._call.read()
            if raw is grpc.aio.EOF:
                raise ParamServerError(f"the server ended a stream: {await self._call.details()}")
            received = parse(messages.pb.ServerMessage, raw)
            if received.kind in kinds:
                return received
            if received.kind != "waiting":
                raise ParamServerError(f"the server sent {received.kind}, expected {kinds}")


@contextmanager
def swarm_life(index: int, num_processes: int, num_workers: int, options: SwarmOptions) -> Iterator[Measured]:
    """This process's share of the ranks; part `rate` exchanges/s, and CPU shares, where others have seconds.

    Parts: rate, busy (this process's CPU time through the time), server (the server's).
    """
    ranks = range(index, num_workers, num_processes)
    payloads = Payloads(options.floats, options.optimizer)
    loop = asyncio.new_event_loop()
    try:
        yield lambda count: loop.run_until_complete(_play(list(ranks), payloads, options))
    finally:
        loop.close()


async def _play(ranks: list[int], payloads: Payloads, options: SwarmOptions) -> Samples:
    channels = [grpc.aio.insecure_channel(options.address, options=_OPTIONS) for _ in ranks]
    players = [Player(channel, rank, payloads, options) for channel, rank in zip(channels, ranks, strict=True)]
    try:
        await asyncio.wait_for(_all([player.join() for player in players]), _JOIN_S)
        is_over = False
        exchanging = asyncio.ensure_future(_all([player.exchange_until(lambda: is_over) for player in players]))
        await _unless_ended(exchanging, _WARMUP_S)
        before = _counts(players, options)
        await _unless_ended(exchanging, options.seconds)
        after = _counts(players, options)
        is_over = True
        await exchanging
        await _all([player.leave() for player in players])
    finally:
        for channel in channels:
            await channel.close()
    elapsed_s, *counted = (b - a for a, b in zip(before, after, strict=True))
    return {part: [value / elapsed_s] for part, value in zip(("rate", "busy", "server"), counted, strict=True)}


async def _all(jobs: list[Awaitable[None]]) -> None:
    await asyncio.gather(*jobs)


async def _unless_ended(job: asyncio.Future[None], seconds: float) -> None:
    """Sleep; raise the exception that ends the exchanges at once."""
    await asyncio.wait([job], timeout=seconds)
    if job.done():
        job.result()
        raise ParamServerError("the run ended before it was measured")


def _counts(players: list[Player], options: SwarmOptions) -> tuple[float, float, float, float]:
    """Returns time, exchanges, and CPU seconds of this process and the server."""
    exchanges = sum(player.num_exchanges for player in players)
    return time.perf_counter(), float(exchanges), time.process_time(), cpu_seconds(options.server_pid)
