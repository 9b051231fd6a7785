"""The calls beside Exchange: signs of life, weights for whoever asks, where the run stands, other shards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
from pydantic import BaseModel

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.tensors.layout import as_bytes
from ...common.wire.frames import body_frames, frame
from ...common.wire.protocol import check_header, layout_to_proto, refusal_to_status
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..engine.engine import Engine
from ..observe import reports
from .refusing import fail, refuse
from .stream import Stream, StreamLost

# How another shard is answered.
Attend = Callable[[AsyncIterator[pb.ShardReport], grpc.aio.ServicerContext], Awaitable[None]]


class Queries:
    """On one run. `stream_of` puts our limits around a call."""

    def __init__(
        self, engine: Engine, config: Config, stream_of: Callable[[Any], Stream], attend: Attend | None
    ) -> None:
        self._engine = engine
        self._attend = attend
        self._config = config
        self._stream_of = stream_of
        self._pulls = asyncio.Semaphore(config.server.max_replies)

    async def heartbeat(self, beats: AsyncIterator[pb.Beat], context: Any) -> AsyncIterator[pb.Pulse]:
        """A worker's signs of life, as long as its process keeps the connection open."""
        process, engine = "", self._engine
        try:
            async for beat in beats:
                check_header(beat)
                if not process and beat.process:
                    process = beat.process
                    engine.offer(events.HeartBegan(process))
                is_member = beat.run == engine.run.name and engine.run.roster.is_member(beat.rank, beat.process)
                if is_member:
                    engine.offer(events.Heard(beat.rank, beat.process))
                yield pb.Pulse(
                    is_gone=not is_member,
                    lease_s=self._config.server.lease_s,
                    durable_version=engine.durable_version,
                )
        except ParamServerError as error:
            await refuse(context, None, error)
        finally:
            if process:
                engine.offer(events.HeartStopped(process))

    async def pull(self, request: pb.PullRequest, context: Any) -> None:
        """The weights of one version, or their Polyak average, whole. A few at once: each is a copy of the weights."""
        stream = self._stream_of(context)
        try:
            async with self._pulls:
                await self._send_snapshot(stream, request.averaged)
        except StreamLost:
            pass
        except ParamServerError as error:
            await refuse(stream, None, error)
        except asyncio.CancelledError:
            if stream.too_slow is None:
                raise
            await refuse(stream, None, stream.too_slow)
        except Exception as error:
            await fail(stream, None, error)
        finally:
            stream.close()

    async def _send_snapshot(self, stream: Stream, averaged: bool) -> None:
        run = self._engine
        if not run.model.has_weights:
            raise refusal(Reason.NOT_READY, "there are no weights yet", fix="try again once training has started")
        store = run.model.store
        if averaged and store.averaged is None:
            raise refusal(
                Reason.BAD_REQUEST,
                "no averaged weights are kept",
                fix="start ps-server with --set store.polyak=0.999",
            )
        version, body = await run.tensors.run(lambda: run.model.copy(averaged))
        snapshot = pb.Snapshot(
            run=run.run.name, version=version, body_bytes=body.numel(), tensors=layout_to_proto(store.layout)
        )
        await stream.write(frame(pb.ServerMessage(snapshot=snapshot)))
        for raw in body_frames([as_bytes(body)]):
            await stream.write(raw)
        await stream.flush()

    async def attend(self, said: AsyncIterator[pb.ShardReport], context: Any) -> None:
        """Another shard, where this server is the coordinator of several."""
        if self._attend is None:
            server = self._config.server
            what = "one process" if server.shards == 1 else f"shard {server.shard}, not the coordinator"
            fix = "start shard 0 with --shards S, and give its address with --coordinator"
            await context.abort(*refusal_to_status(refusal(Reason.SHARD_MISMATCH, f"this server is {what}", fix=fix)))
        else:
            await self._attend(said, context)

    async def status(self, _: pb.StatusRequest, context: Any) -> pb.StatusReply:
        status = reports.status(self._engine)
        workers = [_message(pb.WorkerStatus, worker, loss=_or_nan(worker.loss)) for worker in status.workers]
        return _message(pb.StatusReply, status, run=self._engine.run.name, workers=workers)


def _message(kind: type[Any], values: BaseModel, **others: Any) -> Any:
    """A message with the fields of the same names; `others` have no such field, or one of another type."""
    known = {name: value for name, value in values if name in kind.DESCRIPTOR.fields_by_name}
    return kind(**known | others)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
