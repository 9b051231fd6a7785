"""A shard's connection to the coordinator, over a real one that breaks off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from paramserver.common.config.schema import Config
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core.run import Follower
from paramserver.ps.engine.engine import Clock
from paramserver.ps.shards.attend import LINES, BeginRun, GoOn, Ready, Register
from paramserver.ps.shards.link import Link

WITHIN_S = 10.0
Attend = Callable[[AsyncIterator[pb.ShardReport], grpc.aio.ServicerContext], Awaitable[None]]


class Calls:
    """A coordinator: each call gets its reply with the next of these, None breaks it off; `heard` is what it was
    told."""

    def __init__(self, *replies: BeginRun | GoOn | None) -> None:
        self._replies = list(replies)
        self.heard: list[list[object]] = []
        self.breaks: list[asyncio.Event] = []

    async def attend(self, reports: AsyncIterator[pb.ShardReport], context: grpc.aio.ServicerContext) -> None:
        heard: list[object] = [LINES.read((await anext(reports)).message)]
        self.heard.append(heard)
        broken = asyncio.Event()
        self.breaks.append(broken)
        reply = self._replies.pop(0)
        if reply is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was reset")
        await context.write(pb.ShardOrder(message=LINES.write(reply)))

        async def hear() -> None:
            async for report in reports:
                heard.append(LINES.read(report.message))

        hearing = asyncio.create_task(hear())
        await broken.wait()
        hearing.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was reset")


async def until(condition) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def coordinator(attend: Attend, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[int]:
    """A server with the call Attend, at the port that this context gives."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(attend, pb.ShardReport.FromString, pb.ShardOrder.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Attend": handler}),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield port
    await server.stop(0)


@contextlib.asynccontextmanager
async def link_to(port: int, **security: object) -> AsyncIterator[Link]:
    address = {"shard": 1, "shards": 2, "coordinator": f"127.0.0.1:{port}"}
    link = Link(Config(server=address, security=security, worker={"give_up_s": 60}), Clock())
    try:
        yield link
    finally:
        await link.close()


REGISTER = Register(1, 2, "127.0.0.1:1")
BEGIN = BeginRun("r", 1, None, "{}")


async def test_what_is_said_goes_out_on_the_newest_connection() -> None:
    """The first one broke off before the run began: nothing may be said on what is left of it."""
    calls = Calls(None, None, BEGIN)
    async with coordinator(calls.attend) as port, link_to(port) as link:
        assert await link.register(REGISTER) == BEGIN
        follower = Follower(happens=lambda event: None, digest=lambda: "")
        link.carry(follower)
        follower.outbox.put(Ready())
        await until(lambda: calls.heard[2][1:] == [Ready()])


async def test_what_must_be_known_is_said_again_on_a_new_connection() -> None:
    calls = Calls(BEGIN, GoOn(0))

    async def follow(link: Link) -> None:
        async for _ in link.orders():
            pass

    async with coordinator(calls.attend) as port, link_to(port) as link:
        await link.register(REGISTER)
        follower = Follower(happens=lambda event: None, digest=lambda: "")
        link.carry(follower)
        follower.outbox.put(Ready())
        await until(lambda: Ready() in calls.heard[0])
        following = asyncio.create_task(follow(link))
        calls.breaks[0].set()
        await until(lambda: len(calls.heard) == 2 and Ready() in calls.heard[1])
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
