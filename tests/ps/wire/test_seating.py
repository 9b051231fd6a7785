"""A stream at a shard that seats nobody: it waits for the coordinator's word about the worker, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from paramserver.common.config.schema import Config
from paramserver.common.version import PROGRAM_VERSION
from paramserver.common.wire.frames import frame
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core import events
from paramserver.ps.core.run import Follower
from paramserver.ps.engine.engine import Engine
from paramserver.ps.engine.modes import make_policy
from paramserver.ps.wire import joining
from paramserver.ps.wire.service import ParameterServerService

from ..streams import Aborted, Stream, turns

CONFIG = Config.model_validate({
    "run": {"mode": "async"},
    "server": {"shard": 1, "shards": 2, "coordinator": "127.0.0.1:1", "lease_s": 0.5, "join_timeout_s": 60},
})  # fmt: skip


class Shard:
    """Shard 1 of run "run", which applies what it is told, or its only one, and a worker's stream to it."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.engine = Engine(config, make_policy(config), name="run")
        if config.server.shard:
            self.engine.sequencer = Follower(happens=self.engine.happens, digest=self.engine.run.digest)
        self.stream = Stream()
        service = ParameterServerService(self.engine)
        self.call = asyncio.ensure_future(service.exchange(None, self.stream))

    def join(self, incarnation: int) -> None:
        join = pb.Join(run="run", rank=0, incarnation=incarnation, server_incarnation=1, seated=True)
        self.stream.send(frame(pb.WorkerMessage(join=join)))


async def test_an_incarnation_that_nobody_seated_is_refused_within_a_lease() -> None:
    shard = Shard()
    shard.join(7)
    with pytest.raises(Aborted, match="NOT_READY"):
        await asyncio.wait_for(shard.call, 10)


async def test_the_coordinators_word_may_come_after_the_worker() -> None:
    shard = Shard()
    shard.join(1)
    await turns()
    assert not shard.stream.received
    shard.engine.happens(events.Joined(1, 0, process="p"))
    await turns()
    assert [received.kind for received in shard.stream.received] == ["welcome"]
    shard.call.cancel()
    await asyncio.wait([shard.call])


async def test_an_older_incarnation_than_the_one_that_was_seated_is_refused_at_once() -> None:
    shard = Shard()
    for stream in (1, 2):
        shard.engine.happens(events.Joined(stream, 0, process=f"p{stream}"))
    shard.join(1)
    await turns()
    assert shard.call.done() and str(shard.call.exception()) == "NOT_JOINED"


@pytest.mark.parametrize(("message", "is_told"), [("0.0.1", True), (PROGRAM_VERSION, False), ("", False)])
async def test_a_worker_of_another_version_is_said_so(
    monkeypatch: pytest.MonkeyPatch, message: str, is_told: bool
) -> None:
    warnings: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(joining.log, "warning", lambda event, **fields: warnings.append((event, fields)))
    server = Shard(Config.model_validate({"run": {"mode": "async"}}))
    server.stream.send(frame(pb.WorkerMessage(join=pb.Join(rank=-1, process="p", program_version=message))))
    await turns()
    assert [received.kind for received in server.stream.received] == ["welcome"]
    server.call.cancel()
    await asyncio.wait([server.call])
    assert [(event, fields["worker"], fields["server"]) for event, fields in warnings] == (
        [("another_version", message, PROGRAM_VERSION)] if is_told else []
    )
