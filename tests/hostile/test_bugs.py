"""What nobody foresaw ends the call in which it happens, with a line in the log, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from paramserver.common.config.schema import Config
from paramserver.common.errors import EXIT_BUG, ParamServerError
from paramserver.common.wire.protocol import SERVICE
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.wire.listening import Listening
from paramserver.ps.wire.service import ParameterServerService
from paramserver.tests.ps.streams import Aborted, Server, Stream, served


def _bug(*_: Any) -> None:
    raise KeyError("nobody\nforesaw this")


def test_a_bug_ends_one_call_and_not_the_run(wire, capfd):
    async def main() -> None:
        config = Config.model_validate({"run": {"mode": "async"}, "server": {"listen": "127.0.0.1:0"}})
        engine = Engine(config, make_policy(config), name="run")
        listening = Listening(config)
        listening.bind()
        await listening.serve(ParameterServerService(engine).handler())
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
        await listening.stop()

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
    peer.send(pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=4 * size)).SerializeToString())
    assert peer.ended()[:2] == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    assert server.popen.poll() is None
    assert "Traceback" not in server.output


@pytest.mark.parametrize(("call", "end"), [("exchange", "read"), ("exchange", "write"), ("pull", "write")])
def test_a_bug_in_a_stream_is_no_lost_connection(call: str, end: str, capfd):
    """A worker would come back and meet it again, and again. So the run ends, and says where it failed."""

    @served(workers=1)
    async def play(server: Server) -> None:
        (worker,) = await server.workers(1)
        stream = worker.stream
        if call == "pull":
            stream = Stream()
            stream.write = _bug_later  # type: ignore[method-assign]
            called = asyncio.ensure_future(server.service.pull(pb.PullRequest(), stream))
        else:
            called = worker.task
            setattr(stream, end, _bug_later)
            worker.contribute(1)
            worker.contribute(2)
        await server.settle()
        error = server.engine.finished.exception()
        assert isinstance(error, ParamServerError) and error.exit_code == EXIT_BUG
        assert "KeyError" in error.message
        with pytest.raises(Aborted):
            await called
        server.calls.remove(worker.task)

    play()
    printed = "".join(capfd.readouterr())
    assert printed.count("stream_failed") == 1 and "test_bugs.py:" in printed


async def _bug_later(*_: Any) -> None:
    _bug()


@served(workers=2)
async def test_a_connection_that_is_gone_is_lost_and_the_run_goes_on(server: Server) -> None:
    first, second = await server.workers(2)

    async def gone(*_: Any) -> None:
        raise grpc.aio.UsageError("RPC already finished")

    first.stream.write = gone  # type: ignore[method-assign]
    first.contribute(1)
    second.contribute(1)
    await server.settle()
    assert not server.engine.finished.done()
    assert second.outcomes == ["START", "APPLIED"]
