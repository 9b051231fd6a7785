"""A shard's connection to the coordinator, over a real one that breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from paramserver.common.config.schema import Config
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core.replication import Follower
from paramserver.ps.engine.clock import Clock
from paramserver.ps.shards.link import Link
from paramserver.ps.shards.messages import LINES, BeginRun, GoOn, Ready, Register

WITHIN_S = 10.0


class Calls(grpc.GenericRpcHandler):
    """A coordinator: each call gets its reply with the next of these, None breaks it off; `heard` is what it was
    told."""

    def __init__(self, *replies: BeginRun | GoOn | None) -> None:
        self._replies = list(replies)
        self.heard: list[list[object]] = []
        self.breaks: list[asyncio.Event] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        assert details.method == f"/{SERVICE}/Attend"
        return grpc.stream_stream_rpc_method_handler(
            self._attend, pb.ShardReport.FromString, pb.ShardOrder.SerializeToString
        )

    async def _attend(self, reports: AsyncIterator[pb.ShardReport], context: grpc.aio.ServicerContext) -> None:
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


async def linked(calls: Calls, scenario) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((calls,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = Link(Config(server={"shard": 1, "shards": 2, "coordinator": f"127.0.0.1:{port}"}), Clock())
    try:
        await scenario(link)
    finally:
        await link.close()
        await server.stop(0)


REGISTER = Register(1, 2, "127.0.0.1:1")
BEGIN = BeginRun("r", 1, None, "{}")


def test_what_is_said_goes_out_on_the_newest_connection() -> None:
    """The first one broke off before the run began: nothing may be said on what is left of it."""
    calls = Calls(None, None, BEGIN)

    async def scenario(link: Link) -> None:
        assert await link.register(REGISTER) == BEGIN
        follower = Follower(happens=lambda event: None, digest=lambda: "")
        link.carry(follower)
        follower.outbox.put(Ready())
        await until(lambda: calls.heard[2][1:] == [Ready()])

    asyncio.run(linked(calls, scenario))


def test_what_must_be_known_is_said_again_on_a_new_connection() -> None:
    calls = Calls(BEGIN, GoOn(0))

    async def scenario(link: Link) -> None:
        await link.register(REGISTER)
        follower = Follower(happens=lambda event: None, digest=lambda: "")
        link.carry(follower)
        follower.outbox.put(Ready())
        await until(lambda: Ready() in calls.heard[0])

        async def follow() -> None:
            async for _ in link.orders():
                pass

        following = asyncio.create_task(follow())
        calls.breaks[0].set()
        await until(lambda: len(calls.heard) == 2 and Ready() in calls.heard[1])
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(linked(calls, scenario))
