"""The gRPC service of one run: the exchange with a worker, heartbeats, pulls, status; and the server that listens."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import grpc.aio
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from safetensors.torch import save

from ...common.config.addresses import join_address, split_address
from ...common.config.schema import Config
from ...common.errors import BindError, ParamServerError, Reason, refusal, shown
from ...common.reporting.log import get_logger
from ...common.security import read_token
from ...common.tensors.layout import as_bytes
from ...common.wire.checks import check_header
from ...common.wire.frames import MAX_DATA_BYTES, MAX_MESSAGE_BYTES, payload_frames
from ...common.wire.json_text import to_json
from ...common.wire.protocol import SERVICE, layout_to_proto, other_protocol, refusal_to_status
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..core.counting import Traffic
from ..engine.engine import Engine
from ..observe import reports
from ..snapshots.store_state import optimizer_tensors
from .conversation import Conversation
from .joining import Joining, settings_of
from .port import Port
from .receiver import metrics_event
from .security import Certificates, TokenCheck, insecurity
from .stream import FirstMessages, Stream, StreamBroken, StreamEnded, StreamLost, Watchdog

log = get_logger()

_MAX_LOGGED = 2_000
_MAX_SHOWN = 200
_NUM_OUTSIDERS = 16  # processes that evaluate, and may send heartbeats
_KEPT_S = 5.0  # time until this shard has a copy that the coordinator already has
# Serves the call of another shard.
Attend = Callable[[AsyncIterator[pb.ShardReport], grpc.aio.ServicerContext], Awaitable[None]]


class ParameterServerService:
    """Implements the service of the proto. `attend` serves other shards; only a coordinator has it."""

    def __init__(self, engine: Engine, attend: Attend | None = None, direct: Port | None = None) -> None:
        self._engine, self._run, self._model = engine, engine.run, engine.model
        self._tensors, self._copies, self._traffic = engine.tensors, engine.copies, engine.traffic
        self._config = config = engine.config
        self._attend = attend or self._not_the_coordinator
        self._watch = Watchdog()
        self._joining = Joining(engine, direct)
        # A worker may have two calls while its process restarts.
        num_heartbeats = 2 * (config.run.workers or config.limits.workers) + _NUM_OUTSIDERS
        self._first_heartbeats = FirstMessages("HeartbeatRequest", config.server.join_timeout_s, num_heartbeats)
        self._pulls = asyncio.Semaphore(config.server.max_replies)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler. Exchange and Pull use raw bytes, which `common/wire/frames.py` encodes."""
        stream, unary = grpc.stream_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        rows = [
            ("Exchange", stream, self.exchange, None, None),
            ("Heartbeat", stream, self.heartbeat, pb.HeartbeatRequest, pb.HeartbeatReply),
            ("Attend", stream, self._attend, pb.ShardReport, pb.ShardOrder),
            ("Pull", grpc.unary_stream_rpc_method_handler, self.pull, pb.PullRequest, None),
            ("PullRows", unary, self.pull_rows, pb.RowsRequest, pb.RowsReply),
            ("Status", unary, self.status, pb.StatusRequest, pb.StatusReply),
        ]
        handlers = {
            name: make(method, request and request.FromString, reply and reply.SerializeToString)
            for name, make, method, request, reply in rows
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _is_memory_wanted(self) -> bool:
        """Whether workers wait for the memory of an upload."""
        return self._model.has_weights and self._model.staging.num_waiting > 0

    async def exchange(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one worker from its join to its end."""
        stream = Stream(context, self._config.limits, self._watch, self._is_memory_wanted)
        conversation = Conversation(self._engine, stream)
        try:
            await self._carry(stream, conversation.run(self._joining, context))
        finally:
            conversation.close()

    async def heartbeat(
        self, heartbeats: AsyncIterator[pb.HeartbeatRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.HeartbeatReply]:
        """Receive the heartbeats of one process. It counts as alive while this call is open and heartbeats arrive."""
        process, is_outside, engine, run = "", False, self._engine, self._run
        try:
            heartbeat = await self._first_heartbeats.first_of(heartbeats)
            while heartbeat is not None:
                check_header(heartbeat)
                if not process and heartbeat.process:
                    process, is_outside = heartbeat.process, not heartbeat.run
                    engine.offer(events.HeartbeatBegan(process, is_outside))
                is_member = heartbeat.run == run.name and run.roster.is_member(heartbeat.rank, heartbeat.process)
                if heartbeat.HasField("metrics"):
                    if is_member:
                        self._traffic.setdefault(heartbeat.rank, Traffic()).measure(heartbeat.metrics.metrics)
                    elif is_outside:  # others are of a worker that has just left
                        engine.offer(metrics_event(None, heartbeat.metrics))
                if is_member:
                    engine.offer(events.Heartbeat(heartbeat.rank, heartbeat.process))
                yield pb.HeartbeatReply(
                    is_gone=run.is_done or run.is_closed if is_outside else not is_member,
                    lease_s=self._config.server.lease_s,
                    durable_version=run.rhythm.durable_version,
                    over_generation=run.policy.over_generation,
                    server_incarnation=run.incarnation,
                )
                heartbeat = await anext(heartbeats, None)
        except ParamServerError as error:
            await refuse(context, error, rank=None)
        finally:
            if process:
                engine.offer(events.HeartbeatStopped(process))

    async def pull(self, request: pb.PullRequest, context: grpc.aio.ServicerContext) -> None:
        """Send the weights of one version, their Polyak average, or the optimizer's state.

        Each call copies the tensors, so only a few calls run at once.
        """
        stream = Stream(context, self._config.limits, self._watch, self._is_memory_wanted)
        await self._carry(stream, self._send_snapshot(stream, request))

    async def _send_snapshot(self, stream: Stream, request: pb.PullRequest) -> None:
        run, model = self._run, self._model
        check_header(request)
        async with self._pulls:
            self._check_weights()
            if request.averaged and model.store.averaged is None:
                fix = "start ps-server with --set store.polyak=0.999"
                raise refusal(Reason.BAD_REQUEST, "no averaged weights are kept", fix=fix)
            tensors: Sequence[pb.TensorSpec] = []
            if request.optimizer:
                version, state = await self._tensors.run(partial(optimizer_tensors, model))
                payload = memoryview(await asyncio.to_thread(save, state))
            else:
                if request.keep or request.reader or request.HasField("version"):
                    version, weights = await self._kept(request)
                else:
                    version, weights = await self._tensors.run(partial(model.copy, request.averaged))
                tensors, payload = layout_to_proto(model.store.layout), as_bytes(weights)
            snapshot = pb.Snapshot(run=run.name, version=version, payload_bytes=len(payload), tensors=tensors)
            await stream.say(pb.ServerMessage(snapshot=snapshot))
            for raw in payload_frames([payload]):
                await stream.write(raw)
            await stream.flush()
            self._copies.release_reader(request.reader)

    def _check_weights(self) -> None:
        if not self._model.has_weights:
            raise refusal(Reason.NOT_READY, "there are no weights yet", fix="try again once training has started")

    async def _kept(self, request: pb.PullRequest) -> tuple[int, torch.Tensor]:
        """Return a version that all shards keep a copy of, and this shard's copy."""
        engine, version, most = self._engine, request.version, self._config.limits.readers
        if (request.keep or request.reader) and not request.HasField("version"):
            if request.reader and self._copies.num_readers_beside(request.reader) >= most:
                message = f"{most} readers (limits.readers) already have a copy of a version"
                raise refusal(Reason.LIMIT_EXCEEDED, message, fix="wait for one of them, or allow more")
            engine.offer(events.CopyAsked(request.reader))
            version = self._run.policy.version
        with contextlib.suppress(TimeoutError):
            await engine.until(lambda: self._copies.get(version) is not None, _KEPT_S)
        if (found := self._copies.get(version)) is None:
            raise refusal(Reason.NOT_READY, f"version {version} is not kept", fix="request another version")
        return version, found

    async def pull_rows(self, request: pb.RowsRequest, context: grpc.aio.ServicerContext) -> pb.RowsReply:
        """Return rows of a table, after all earlier decisions have been carried out."""
        engine = self._engine
        try:
            if why := engine.why_not_ready():  # a new coordinator learns the run's name from its shards
                raise refusal(Reason.NOT_READY, f"{why}: there are no rows yet", fix="ask again in a moment")
            if request.run != self._run.name:  # another shard may not know the run's name yet
                reason = Reason.NOT_READY if self._config.server.shard else Reason.RUN_MISMATCH
                raise refusal(reason, f"this server runs {self._run.name}, not {request.run[:40]!a}")
            if not request.ids:
                return pb.RowsReply(shards=engine.shard_addresses)
            self._check_weights()
            if (tables := self._model.store.tables) is None:
                raise refusal(Reason.BAD_REQUEST, "this run has no tables of rows")
            rows = await self._tensors.run(partial(tables.pull, request.table, request.ids, MAX_DATA_BYTES))
        except ParamServerError as error:
            await refuse(context, error, rank=request.rank)
        if (traffic := self._traffic.get(request.rank)) is not None:
            traffic.num_sent += len(request.ids)
            traffic.num_received += len(rows)
        return pb.RowsReply(rows=rows)

    async def _carry(self, stream: Stream, work: Awaitable[None]) -> None:
        """Serve one call, and end it. `stream.refused` is the refusal, if the call ended with one.

        An unexpected exception is logged in one line and ends this call only: the run continues."""
        try:
            with contextlib.suppress(StreamEnded):
                await work
            await stream.flush()
        except StreamLost:
            pass
        except ParamServerError as error:
            stream.refused = error
            traceback.clear_frames(error.__traceback__)
            await refuse(stream, error, rank=stream.rank)
        except asyncio.CancelledError as cancelled:
            # The call's task keeps the frames, and the frames an upload, so a worker's shared memory would stay mapped.
            traceback.clear_frames(cancelled.__traceback__)
            if stream.refused is None:  # the connection is gone
                raise
            await refuse(stream, stream.refused, rank=stream.rank)
        except StreamBroken as broken:
            self._engine.broke("stream", broken.__cause__ or broken, rank=stream.rank)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)  # the end of the run ends this call too
            traceback.clear_frames(broken.__traceback__)
            await refuse(stream, stream.refused or refusal(Reason.INTERNAL, "the server failed"), rank=stream.rank)
        except Exception as error:
            stream.refused = ParamServerError(f"the server failed on a message: {type(error).__name__}")
            frames = traceback.extract_tb(error.__traceback__)
            traceback.clear_frames(error.__traceback__)
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            text = shown(f"{type(error).__name__}: {error}", _MAX_LOGGED)
            log.error("internal_error", rank=stream.rank, error=text, where=where)
            message = f"the server failed on a message: {text[:_MAX_SHOWN]}"
            await stream.abort(*refusal_to_status(refusal(Reason.INTERNAL, message)))
        finally:
            stream.close()

    async def _not_the_coordinator(self, _: AsyncIterator[pb.ShardReport], context: grpc.aio.ServicerContext) -> None:
        server = self._config.server
        role = "one process" if server.shards == 1 else f"shard {server.shard}, not the coordinator"
        fix = "start shard 0 with --shards S, and give its address with --coordinator"
        await refuse(context, refusal(Reason.SHARD_MISMATCH, f"this server is {role}", fix=fix))

    async def status(self, _: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        """Return the run's status."""
        status, run = reports.status(self._engine), self._run
        return pb.StatusReply(
            run=run.name, settings=settings_of(self._config, run), version=status.version, step=status.step,
            status=to_json(status.fields()), incarnation=run.incarnation,
        )  # fmt: skip


# ---- the end of a call ------------------------------------------------------------------------------


async def refuse(call: Stream | grpc.aio.ServicerContext, error: ParamServerError, **whom: int | None) -> None:
    """End a call with a refusal. It raises gRPC's exception."""
    reason = (error.reason or Reason.BAD_REQUEST).value
    log.warning("refused", **whom, reason=reason, message=shown(error.message, _MAX_LOGGED))
    await call.abort(*refusal_to_status(error))


# ---- listening -----------------------------------------------------------------------------------
# The gRPC server of a process: its address, its limits, health and reflection.


_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # Limits the bytes that gRPC buffers before they are read. Its own estimate could grow to the size of a large model.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Without the first option, a silent TLS connection stayed open for 40 s. Without the second, one connection ran
    # 300 handlers.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


# Both options are set to one lease. The lease releases a frozen or unreachable worker. Pings must not close its
# connections earlier, because a closed connection means that the worker has ended. The second option also sets the
# kernel's limit for unacknowledged bytes. A ping waits behind the weights that were sent before it (8 MB at 10 Mbit/s
# take 6.7 s), so `ping_timeout_ms` is longer.
_PINGS_MS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms")
_LEAST_PING_MS = 60_000
_STOP_S = 0.02
_END_S = 1.0
_RPC_TASK = "rpc_task"  # grpc.aio's name of its tasks


class Listening:
    """The gRPC server of one process. Call `bind`, then `serve`, and finally `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        lease_ms, token = int(1000 * config.server.lease_s), read_token(config.security)
        pings = dict.fromkeys(_PINGS_MS, lease_ms) | {"grpc.http2.ping_timeout_ms": max(lease_ms, _LEAST_PING_MS)}
        interceptors = [TokenCheck(token)] if token is not None else []
        self._grpc = grpc.aio.server(options=[*_OPTIONS, *pings.items()], interceptors=interceptors)
        self._health = health.aio.HealthServicer()
        self.address = ""
        self.direct = Port(config)

    def bind(self) -> None:
        """Bind the address, with TLS if there is a certificate. Raises BindError."""
        listen, security = self._config.server.listen, self._config.security
        bound = 0
        with contextlib.suppress(RuntimeError):
            if security.cert is None:
                bound = self._grpc.add_insecure_port(listen)
            else:
                certificates = Certificates(security)
                tls = grpc.dynamic_ssl_server_credentials(certificates.current(), certificates, security.mutual)
                bound = self._grpc.add_secure_port(listen, tls)
        if bound == 0:
            problem = f"cannot listen on {listen}: port in use, or not an address of this machine"
            fix = "stop the other process, or choose --listen HOST:PORT with another port (0 takes a free one)"
            raise BindError(problem, fix=fix)
        self.address = join_address(split_address(listen)[0], bound)
        self.direct.open()

    async def serve(self, handler: grpc.GenericRpcHandler) -> None:
        """Start to serve calls, and report healthy."""
        self._grpc.add_generic_rpc_handlers((handler, _OtherProtocols()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        await self._grpc.start()
        await self.say_healthy(True)
        if (lacks := insecurity(self._config)) is not None:
            meaning = f"{lacks}; anyone who reaches this port can read and train"
            log.warning("insecure", address=self.address, meaning=meaning)

    async def say_healthy(self, is_healthy: bool) -> None:
        """Set the status that gRPC's health service reports."""
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if is_healthy else status.NOT_SERVING)

    async def stop(self) -> None:
        """Stop serving. Heartbeats never end by themselves, so open calls get little time to end."""
        await self._grpc.stop(_STOP_S)
        await self.direct.close()
        # Wait for cancelled handlers and gRPC's own tasks. If the loop ended before them, they would log a traceback.
        ending = [task for task in asyncio.all_tasks() if task.cancelling() or task.get_name() == _RPC_TASK]
        if ending:
            await asyncio.wait(ending, timeout=_END_S)


class _OtherProtocols(grpc.GenericRpcHandler):
    """Refuses calls of older and newer versions of the protocol."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        message = other_protocol(handler_call_details.method)
        if message is None:
            return None

        async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

        return grpc.stream_stream_rpc_method_handler(refuse)
