"""What nobody foresaw ends the call in which it happens, with a line in the log, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from paramserver.common.config.schema import Config
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.wire.listening import Listening
from paramserver.ps.wire.service import ParameterServerService


def _bug(*_: Any) -> None:
    raise KeyError("nobody\nforesaw this")


def test_a_bug_ends_one_call_and_not_the_run(wire, capfd):
    async def main() -> None:
        config = Config.model_validate({"run": {"mode": "async"}, "server": {"listen": "127.0.0.1:0"}})
        engine = Engine(config, make_policy(config), name="run")
        listening = Listening(config)
        listening.bind()
        await listening.serve(ParameterServerService(engine, config).handler())
        good = engine.model.check
        engine.model.check = _bug  # type: ignore[method-assign]
        async with grpc.aio.insecure_channel(listening.address, options=wire.OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _offer(channel, wire)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert dict(caught.value.trailing_metadata() or ())["ps-reason"] == "INTERNAL"
            assert "KeyError" in (caught.value.details() or "")
            assert not engine.finished.done()
            assert not engine.run.roster.workers
            engine.model.check = good  # type: ignore[method-assign]
            assert await _offer(channel, wire) == "send_weights"
        await listening.stop(0.0)

    asyncio.run(main())
    printed = "".join(capfd.readouterr())
    assert printed.count("internal_error") == 1
    assert "Traceback" not in printed


async def _offer(channel: grpc.aio.Channel, wire: Any) -> str:
    """Join and offer a model; what the server says to it."""
    call: Any = channel.stream_stream(f"/{SERVICE}/Exchange")()
    await call.write(wire.join_bytes(0))
    await call.write(wire.model_bytes())
    while True:
        raw = await call.read()
        if raw is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        kind = pb.ServerMessage.FromString(raw).WhichOneof("kind")
        if kind != "welcome":
            return str(kind)


def test_a_model_that_no_memory_holds(start_server, wire):
    """It is refused when the memory cannot be had, and the server stays."""
    server = start_server(*wire.ENDLESS, "--set", "limits.model_bytes=1000000000000000")
    peer = server.peer(0)
    size = 1 << 47
    peer.send(wire.join_bytes(0), wire.model_bytes(wire.layout(size)))
    peer.receive("welcome")
    peer.receive("send_weights")
    peer.send(pb.WorkerMessage(initial_weights=pb.InitialWeights(body_bytes=4 * size)).SerializeToString())
    assert peer.ended()[:2] == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    assert server.popen.poll() is None
    assert "Traceback" not in server.output
