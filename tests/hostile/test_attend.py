"""Strangers at the calls of shards and heartbeats: silent calls are few and end, reports that are no JSON are
refused, and the shards themselves are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.shards.attend import LINES, Register

JOIN_S = 3.0
NUM_SILENT, MOST_SILENT = 100, 18


REGISTER = LINES.write(Register(shard=1, shards=2, address="127.0.0.1:9", program_version=""))


async def ended(channel: grpc.aio.Channel, *reports: str, method: str = "Attend") -> tuple[grpc.StatusCode, str]:
    """How a call ends that says these, and then nothing for ever."""
    call = channel.stream_stream(f"/{SERVICE}/{method}", pb.ShardReport.SerializeToString)()
    for report in reports:
        await call.write(pb.ShardReport(message=report))
    return await call.code(), await call.details()


def test_reports_that_are_no_json_and_silent_calls(start_server: Callable[..., Any]) -> None:
    """A coordinator that waits for shard 1 of 2 refuses the ones, ends the others, and hears a shard meanwhile."""
    server = start_server("--mode", "async", "--shards", "2", "--set", f"server.join_timeout_s={JOIN_S}")

    async def hears_a_shard(channel: grpc.aio.Channel) -> None:
        """Only of a shard that is heard the version can be wrong."""
        code, words = await ended(channel, REGISTER)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "it is paramserver of no version" in words

    async def main() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            for text in ("[" * 100_000, '{"kind":' * 100_000, '{"kind":"Register","address":"\\ud800"}'):
                code, words = await ended(channel, text)
                assert code is grpc.StatusCode.INVALID_ARGUMENT and "not a known message" in words
            await hears_a_shard(channel)
            beating = asyncio.ensure_future(ended(channel, method="Heartbeat"))
            silent = [asyncio.ensure_future(ended(channel)) for _ in range(NUM_SILENT)]
            await asyncio.wait_for(asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED), 30)
            await hears_a_shard(channel)
            found = await asyncio.wait_for(asyncio.gather(*silent), 30)
            no_heartbeat = f"no HeartbeatRequest within {JOIN_S:g} s (server.join_timeout_s)"
            assert await asyncio.wait_for(beating, 30) == (grpc.StatusCode.INVALID_ARGUMENT, no_heartbeat)
            assert {code for code, _ in found} == {grpc.StatusCode.INVALID_ARGUMENT}
            # The shard was the newest for a moment, and cost one more of them.
            assert Counter(words for _, words in found) == {
                f"no Register within {JOIN_S:g} s (server.join_timeout_s)": MOST_SILENT - 1,
                f"no Register before {MOST_SILENT} newer calls": NUM_SILENT - MOST_SILENT + 1,
            }

    asyncio.run(main())
    assert "Traceback" not in server.output
