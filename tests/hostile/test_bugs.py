"""What nobody foresaw ends the call in which it happens, with a line in the log, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from paramserver.common.errors import EXIT_BUG, ParamServerError
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.tests.ps.streams import Aborted, Server, Stream, Worker, served

from . import conftest as wire


def _bug(*_: Any) -> None:
    raise KeyError("nobody\nforesaw this")


@served(mode="async", workers=1)
async def test_a_bug_ends_one_call_and_not_the_run(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    good, server.engine.model.check = server.engine.model.check, _bug  # type: ignore[method-assign]
    worker = Worker(server, 0)
    await worker.join()
    assert await worker.end() == "INTERNAL"
    error = worker.task.exception()
    assert isinstance(error, Aborted) and "KeyError" in error.texts[0]
    assert not server.engine.finished.done()
    assert not server.engine.run.roster.workers
    server.engine.model.check = good  # type: ignore[method-assign]
    await server.workers(1)
    printed = "".join(capfd.readouterr())
    assert printed.count("internal_error") == 1
    assert "Traceback" not in printed


def test_a_model_that_no_memory_holds(start_server):
    """It is refused when the memory cannot be had, and the server stays."""
    server = start_server(*wire.ENDLESS, "--set", "limits.model_bytes=1000000000000000")
    peer = server.peer(0)
    size = 1 << 47
    peer.send(wire.join_bytes(0), wire.model_bytes(wire.layout_of(size)))
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
