"""A server's own service and run, and a worker or a shard that says what it is told to say: all but gRPC is real."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paramserver.common.config.schema import Config
from paramserver.common.errors import ParamServerError
from paramserver.common.tensors.optimizers import OptimizerSpec
from paramserver.common.wire.checks import struct
from paramserver.common.wire.frames import frame, message_frames
from paramserver.proto import parameter_server_pb2 as pb
from paramserver.ps.core import events
from paramserver.ps.core.run import Coordinator, Digest
from paramserver.ps.engine.folding import ShardState
from paramserver.ps.shards.attend import LINES, BeginRun, End, GoOn, Ready, Register, ShardFailed
from paramserver.ps.shards.server import shared_config, with_shared
from paramserver.ps.snapshots.manifest import Manifest, layout_of, read_manifest

from ..ps.streams import SMALL, Aborted, Server, Worker, turns
from ..records import contributed
from .conftest import contribution_header, initial_weights, join_bytes, model_bytes
from .hostile import Hostile

MODES = ("async", "sync", "localsgd", "diloco", "allreduce", "ssp")
_NUM_TALKS = 20  # with one server


class ServerEnd:
    """One server after another, of every mode, hears hostile conversations."""

    def __init__(self) -> None:
        self.num_refused = self._num_servers = 0

    def talk(self, hostile: Hostile) -> int:
        """With one server, until it has ended or heard enough; how many conversations that were."""
        self._num_servers += 1
        return asyncio.run(self._serve(hostile, MODES[self._num_servers % len(MODES)]))

    async def _serve(self, hostile: Hostile, mode: str) -> int:
        server = Server(SMALL, 4, {}, mode=mode, steps=1000)
        try:
            for number in range(_NUM_TALKS):
                if server.engine.finished.done():  # a member may end the run
                    error = server.engine.finished.exception()
                    assert error is None or isinstance(error, ParamServerError), repr(error)
                    return number
                await (self._beside if hostile.random.random() < 0.15 else self._conversation)(hostile, server)
            assert not server.engine.is_broken
            return _NUM_TALKS
        finally:
            for call in server.calls:
                call.cancel()
            await asyncio.gather(*server.calls, return_exceptions=True)
            server.engine.tensors.close()

    async def _conversation(self, hostile: Hostile, server: Server) -> None:
        worker = Worker(server, hostile.random.choice([0, 0, 0, 1, 70_000]))
        polite = self._polite(server)
        keep = hostile.random.randint(0, len(polite) - 1)
        for chunk in polite[:keep]:
            worker.stream.send(*chunk)
            await turns(20)
        for at in range(hostile.random.randint(1, 3)):
            worker.stream.send(*self._impolite(hostile, polite[(keep + at) % len(polite)]))
            await turns(10)
        worker.stream.close()
        await server.settle()
        if not worker.task.done():  # it waits for others, as it may
            worker.task.cancel()
            await asyncio.gather(worker.task, return_exceptions=True)
            return
        if worker.task.cancelled():
            return
        error = worker.task.exception()
        assert error is None or (isinstance(error, Aborted) and str(error) != "INTERNAL"), repr(error)
        self.num_refused += error is not None

    def _polite(self, server: Server) -> list[Sequence[bytes]]:
        """What a worker says, message by message."""
        kind = pb.RunSettings.DELTA if server.engine.run.policy.kind.holds_differences else 0
        header = contribution_header(
            1, layout=SMALL, generation=1, loss=1.0, hyperparameters=[struct({"lr": 0.5})],
            first=pb.FirstInfo(num_samples=9), position=pb.Position(step=0),
        )  # fmt: skip
        payload = [memoryview(bytes(SMALL.exchange_bytes))]
        return [
            [join_bytes(0)],
            [model_bytes(SMALL, contribution=kind, rendezvous="127.0.0.1:1")],
            [] if server.engine.model.has_weights else list(initial_weights(SMALL)),
            [frame(pb.WorkerMessage(state=pb.State(num_bytes=4, piece=b"abcd")))],
            [frame(pb.WorkerMessage(begin=pb.Begin(num_bytes=SMALL.exchange_bytes)))],
            list(message_frames(header, payload)),
            [frame(pb.WorkerMessage(metrics=pb.Metrics(version=1, step=1, metrics={"loss": 1.0})))],
            [frame(pb.WorkerMessage(finish=pb.Finish(transfer_s=0.1)))],
            [frame(pb.WorkerMessage(leave=pb.Leave(final_metrics={"loss": 1.0})))],
        ]

    def _impolite(self, hostile: Hostile, polite: Sequence[bytes]) -> list[bytes]:
        way, messages = hostile.random.random(), list(polite)
        if not messages or way < 0.2:
            message = pb.WorkerMessage()
            hostile.fill(message)
            messages = [message.SerializeToString()]
        elif way < 0.8:
            message = pb.WorkerMessage.FromString(messages[0])
            hostile.spoil(message if way < 0.3 else getattr(message, message.WhichOneof("kind")))
            messages[0] = message.SerializeToString()
        if way > 0.7:
            messages[0] = hostile.mutate(messages[0], messages)
        return messages

    async def _beside(self, hostile: Hostile, server: Server) -> None:
        """The calls that are no conversation."""
        service, call = server.service, Worker(server, 0).stream
        message, reply = hostile.random.choice([
            (
                pb.HeartbeatRequest(
                    run="run", process="p", metrics=pb.Metrics(version=1, metrics={"loss": 1.0})
                ),
                self._heartbeat,
            ),
            (pb.PullRequest(), service.pull),
            (pb.RowsRequest(run="run", ids=bytes(8)), service.pull_rows),
        ])  # fmt: skip
        hostile.spoil(message)
        if isinstance(message, pb.PullRequest):  # it would wait for the version, which is no hang
            message.ClearField("version")
        replied = reply(server, message, call) if reply == self._heartbeat else reply(message, call)
        (error,) = await asyncio.gather(replied, return_exceptions=True)
        if isinstance(error, BaseException):
            assert isinstance(error, Aborted) and str(error) != "INTERNAL", repr(error)
            self.num_refused += 1

    async def _heartbeat(self, server: Server, heartbeat: pb.HeartbeatRequest, context: Any) -> None:
        async def heartbeats() -> Any:
            yield heartbeat

        async for _ in server.service.heartbeat(heartbeats(), context):
            pass


class ShardEnd:
    """What a coordinator hears of a shard, and a shard of its coordinator."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._shard_config = Config(server={"shard": 1, "shards": 2})
        self._config = shared_config(Config(run={"mode": "async"}, server={"shards": 2}))
        self._lines = [LINES.write(item) for item in (
            Register(1, 2, "127.0.0.1:9"), Ready(), ShardFailed("why"), Digest(256, "abc"), GoOn(1), End("why", 1),
            BeginRun("run", 1, None, self._config), events.Offered(0, 1, "m", "o"), contributed(0, 1, 1, 0),
            events.Stored(1, 1), events.Measured(1, 1.0), events.AskedAgain(0, 1, 1), events.Brought(0, 1),
            events.Controlled("set", None, "mode", "ssp"), ShardState(*[0] * _num_of(ShardState)),
        )]  # fmt: skip
        self._new()

    def _new(self) -> None:
        self._coordinator = Coordinator(
            2, happens=lambda event: None, now=lambda: 0.0, judge=lambda parts: parts[0], digest=lambda: "abc"
        )

    def deliver(self, hostile: Hostile) -> None:
        text = hostile.random.choice(self._lines)
        for _ in range(hostile.random.randint(1, 2)):
            text = hostile.json(text)
        message = pb.ShardReport(number=1, message="")
        hostile.spoil(message, 1)
        try:
            if hostile.random.random() < 0.2:
                with_shared(self._shard_config, hostile.json(self._config))
                return
            heard = LINES.read(text)
            if isinstance(heard, BeginRun):
                with_shared(self._shard_config, heard.config)
            elif isinstance(heard, Digest | events.Event):
                self._coordinator.outboxes[1].acknowledge(message.num_received)
                self._coordinator.hear(1, message.number, heard)
        except ParamServerError:
            self.num_refused += 1
            self._new()


def _num_of(kind: Any) -> int:
    return len(getattr(kind, "_fields", None) or kind.__dataclass_fields__)


class SnapshotEnd:
    """What a server reads of a snapshot before it goes on from it."""

    def __init__(self) -> None:
        self.num_refused = 0
        manifest = Manifest.model_validate({
            "run": "run", "server_incarnation": 1, "version": 3, "mode": "sync", "rows": {0: (3, 3, 3, 3, 0)},
            "num_joins": {0: 1}, "policy": {},
            "training": {"lr_scale": 1.0, "changed": {}, "stats": {}, "places": {"0": {"step": 1}}},
            "tensors": SMALL.specs, "optimizer": OptimizerSpec("SGD", ()), "hyperparameters": (),
            "seed": 0, "paramserver_version": "0",
        })  # fmt: skip
        self._text = manifest.model_dump_json()

    def deliver(self, hostile: Hostile) -> None:
        text = self._text
        for _ in range(hostile.random.randint(1, 2)):
            text = hostile.json(text)
        try:
            manifest = read_manifest(text.encode(errors="replace"))
            layout_of(manifest.tensors, manifest.optimizer)
        except ParamServerError:
            self.num_refused += 1
