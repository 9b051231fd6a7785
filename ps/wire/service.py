"""The service translates: frames from workers into events of the run, its answers into frames.

One coroutine per worker reads and writes that worker's stream in turn; the end of the
coroutine, for whatever reason, is the worker's leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, refusal
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.frames import Frame, frame
from ...common.wire.protocol import (
    SERVICE,
    layout_from_proto,
    optimizer_from_proto,
    segment_to_proto,
    struct,
)
from ...common.wire.segments import SegmentAddress
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..engine.engine import Engine
from ..engine.peers import Done, Go, Peer, SendWeights, Waiting
from ..tensors.model import names_of
from .delivery import deliver
from .intake import Intake, codec_named
from .lanes.shared import SharedMemory, taken
from .limits import Joins, Watch
from .queries import Attend, Queries
from .refusing import fail, loggable, refuse
from .security import check_rank
from .stream import Stream, StreamLost

log = get_logger()

# A larger description of a model is read beside the event loop: about 10 us for each of its tensors.
_LARGE_MODEL_BYTES = 64 << 10
_SAY_WAITING_S = 1.0


class ParameterServerService:
    """Implements the proto's service on one run."""

    def __init__(self, engine: Engine, config: Config, attend: Attend | None = None) -> None:
        """`attend` answers other shards, on the coordinator of several."""
        self._engine = engine
        self._config = config
        self._intake = Intake(engine)
        self._watch = Watch()
        self._joins = Joins(config.limits.joins_per_s, config.run.workers or config.limits.workers)
        self._queries = Queries(engine, config, self._stream, attend)
        self._shared = SharedMemory(config.server.shared_memory)

    # ---- Exchange ---------------------------------------------------------------------------

    async def exchange(self, _: AsyncIterator[bytes], context: Any) -> None:
        """A worker's whole life in the run."""
        stream = self._stream(context)
        peer: Peer | None = None
        refused: ParamServerError | None = None
        try:
            peer = await self._join(stream, context)
            if (
                peer is not None
                and await self._meet(stream, peer)
                and (peer.is_resumed or await self._send_outbox(stream, peer))
                and (goodbye := await self._contributions(stream, peer)) is not None
            ):
                figures = dict(goodbye.of(pb.Leave).metrics)
                self._engine.offer(events.Left(*peer.seat, "goodbye", "said goodbye", figures))
            await stream.flush()
        except StreamLost:
            pass
        except ParamServerError as error:
            refused = error
            traceback.clear_frames(error.__traceback__)
            await refuse(stream, _rank(peer), error)
        except asyncio.CancelledError as cancelled:
            # The call's task keeps them, and they hold an upload: memory a worker shared would stay mapped.
            traceback.clear_frames(cancelled.__traceback__)
            # Either the connection is gone, or there is something to say that cannot wait.
            refused = stream.too_slow or (peer.ended_with if peer is not None else None)
            if refused is None:
                raise
            await refuse(stream, _rank(peer), refused)
        except Exception as error:
            refused = ParamServerError(f"the server failed on what it was sent: {type(error).__name__}")
            await fail(stream, _rank(peer), error)
        finally:
            stream.close()
            if peer is not None:
                self._over(peer, refused)

    def _over(self, peer: Peer, refused: ParamServerError | None) -> None:
        taken(self._engine, peer)
        self._engine.detach(peer)
        if refused is not None:
            self._engine.offer(events.Left(*peer.seat, "closed", loggable(refused.message)))
        else:
            self._engine.offer(events.Disconnected(*peer.seat))
        # The call's traceback and the peer hold each other: let go of what is large at once.
        peer.segment, peer.weights, peer.interrupt = None, None, _nothing

    def _stream(self, context: Any) -> Stream:
        model = self._engine.model
        return Stream(
            context,
            self._config.limits,
            self._watch,
            lambda: model.has_weights and model.staging.num_waiting > 0,
        )

    async def _join(self, stream: Stream, context: Any) -> Peer | None:
        first = await self._read_in_time(stream, "join")
        if first is None:
            return None
        join = first.of(pb.Join)
        rank = check_rank(context, join.rank if join.rank >= 0 else None)
        await self._wait_turn(stream)
        await self._wait_for_shards(stream)
        peer = await self._seat(join, rank)
        if peer.is_resumed:
            memory = self._engine.codec_memory(peer.rank)
            self._engine.tensors.submit(partial(memory.resumed, join.answers_taken))
        if (task := asyncio.current_task()) is not None:
            peer.interrupt = task.cancel
        return peer

    async def _seat(self, join: pb.Join, rank: int | None) -> Peer:
        """Give the process a rank, or find the one that the coordinator has given it."""
        server, run = self._config.server, self._engine.run
        if server.shard == 0:
            peer = self._engine.join(
                lambda stream: events.Joined(
                    stream, rank, join.run, join.incarnation, join.server_incarnation, join.process
                )
            )
            log.info(
                "joined", rank=peer.rank, incarnation=peer.incarnation, resumed=peer.is_resumed, host=join.host,
                pid=join.pid, device=join.device,
            )  # fmt: skip
            return peer
        if not join.seated or rank is None:
            raise refusal(
                Reason.SHARD_MISMATCH,
                f"this is shard {server.shard} of {server.shards}: workers join the coordinator",
                fix=f"ps-worker --server {server.coordinator}",
            )
        if join.run != run.name:
            raise refusal(
                Reason.RUN_MISMATCH,
                f"the worker belongs to run {join.run}, shard {server.shard} to run {run.name}",
                fix="every shard needs the coordinator of its own run (--coordinator)",
            )
        if join.server_incarnation != run.incarnation or run.is_closed:
            raise refusal(Reason.NOT_READY, f"shard {server.shard} has not gone back yet, or is stopping")
        try:
            async with asyncio.timeout(server.join_timeout_s):
                return await self._engine.seated(rank, join.incarnation)
        except TimeoutError:
            what = f"the coordinator has not told shard {server.shard} of rank {rank}, incarnation {join.incarnation}"
            raise refusal(Reason.NOT_READY, what) from None

    async def _meet(self, stream: Stream, peer: Peer) -> bool:
        """Say who it is, and hear what it trains; False when it has gone instead."""
        run = self._engine.run
        welcome = pb.Welcome(
            run=run.name,
            rank=peer.rank,
            incarnation=peer.incarnation,
            step=peer.number,
            settings=self._settings(),
            probe=self._shared.probe,
            server_incarnation=run.incarnation,
            resumed=peer.is_resumed,
            lease_s=self._config.server.lease_s,
            shards=self._engine.shard_addresses,
        )
        await stream.write(frame(pb.ServerMessage(welcome=welcome)))
        second = await self._read_in_time(stream, "model", "leave")
        if second is None:
            return False
        if second.kind == "leave":
            self._engine.offer(events.Left(*peer.seat, "goodbye", "said goodbye"))
            return False
        model = second.of(pb.Model)
        layout, optimizer = await _read_model(model)
        if model.HasField("segment"):
            share = self._engine.model.share_of(layout)
            await self._shared.open(stream, peer, share.layout, model.segment)
        codec = codec_named(model.answer_codec)
        peer.answer_codec = None if codec.is_identity else codec
        self._engine.model.check(peer.rank, layout, optimizer)
        peer.offer = (layout, optimizer)
        peer.state = "computing" if peer.is_resumed else "waiting"
        self._engine.offer(events.Offered(*peer.seat, *names_of(layout, optimizer)))
        return True

    async def _wait_turn(self, stream: Stream) -> None:
        """Joins beyond the rate wait, and are told so."""
        left_s = self._joins.turn()
        while left_s > 0:
            if left_s > _SAY_WAITING_S:
                waiting = pb.Waiting(reason="many workers join at once (limits.joins_per_s)")
                await stream.write(frame(pb.ServerMessage(waiting=waiting)))
            await asyncio.sleep(min(left_s, _SAY_WAITING_S))
            left_s -= _SAY_WAITING_S

    async def _wait_for_shards(self, stream: Stream) -> None:
        """Nobody joins before all shards are there; who waits is told for which."""
        while reason := self._engine.why_not_ready():
            await stream.write(frame(pb.ServerMessage(waiting=pb.Waiting(reason=reason))))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SAY_WAITING_S):
                    while self._engine.why_not_ready():
                        await self._engine.changed()

    async def _read_in_time(self, stream: Stream, *kinds: str) -> Frame | None:
        """The next message of a worker that has not been let in yet, or that others wait for."""
        timeout_s = self._config.server.join_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await stream.read(*kinds)
        except TimeoutError:
            name = kinds[0].replace("_", " ").capitalize()
            what = f"no {name} within {timeout_s:g} s (server.join_timeout_s)"
            raise refusal(Reason.BAD_REQUEST, what) from None

    def _settings(self) -> pb.RunSettings:
        config, policy = self._config, self._engine.run.policy
        kinds = {"gradient": pb.RunSettings.GRADIENT, "weights": pb.RunSettings.WEIGHTS}
        task = config.task.name if ".py:" not in config.task.name else ""
        return pb.RunSettings(
            mode=config.run.mode,
            contribution=kinds[policy.contribution],
            num_workers=config.run.workers or 0,
            steps=config.run.steps,
            batch_size=config.run.batch_size,
            seed=config.run.seed,
            pull_every=policy.pull_every,
            task=task,
            task_args=struct(config.task.args),
            optimizer=pb.Optimizer(
                name=config.optimizer.name,
                groups=[pb.ParameterGroup(hyperparameters=struct(config.optimizer.arguments()))],
            ),
            polyak=config.store.polyak or 0.0,
            pipelined=config.policy.pipelined,
        )

    async def _contributions(self, stream: Stream, peer: Peer) -> Frame | None:
        """Exchange until the worker goes; its goodbye, or None when its stream ended instead."""
        while True:
            received = await self._intake.next(stream, peer)
            if received is None or received.kind == "leave":
                return received
            if received.kind == "finish":
                peer.state = "finished"
                facts = received.of(pb.Finish)
                self._engine.offer(events.Finished(*peer.seat, facts.transfer_s, facts.can_evaluate))
                if not await self._send_outbox(stream, peer):
                    return None
                while (goodbye := await stream.read("leave", "taken")) is not None and goodbye.kind == "taken":
                    taken(self._engine, peer)
                return goodbye
            if not await self._send_outbox(stream, peer):
                return None

    # ---- what the run says to a worker ----------------------------------------------------------

    async def _send_outbox(self, stream: Stream, peer: Peer) -> bool:
        """Send until the worker may go on; False when its stream ended instead."""
        while True:
            match await peer.outbox.get():
                case Waiting(reason):
                    await stream.write(frame(pb.ServerMessage(waiting=pb.Waiting(reason=reason))))
                case SendWeights():
                    if not await self._take_initial_weights(stream, peer):
                        return False
                case Go() as go:
                    await self._answer(stream, peer, go)
                    return True
                case Done() as done:
                    await self._final(stream, peer, done)
                    return True

    async def _take_initial_weights(self, stream: Stream, peer: Peer) -> bool:
        await stream.write(frame(pb.ServerMessage(send_weights=pb.SendWeights())))
        first = await self._read_in_time(stream, "initial_weights")
        if first is None:
            return False
        model = self._engine.model
        layout = model.layout
        assert layout is not None
        num_bytes = first.of(pb.InitialWeights).body_bytes
        if num_bytes != layout.total_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"initial weights of {num_bytes} bytes; this model's have {layout.total_bytes}",
            )
        try:
            weights = model.new_memory()
        except (MemoryError, RuntimeError):  # numpy's and torch's
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"no memory for a model of {layout.total_bytes:,} bytes",
                fix="give the server more memory; limits.model_bytes is what it promises to take",
            ) from None
        if not await stream.read_body(first, layout.total_bytes, _copy_into(weights.bytes)):
            return False
        model.check_finite(peer.rank, weights)
        peer.weights, peer.state = weights, "waiting"
        self._engine.offer(events.Brought(*peer.seat))
        return True

    async def _answer(self, stream: Stream, peer: Peer, go: Go) -> None:
        said = go.answer

        def header(version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage:
            answer = pb.Answer(
                outcome=said.outcome,
                step=said.number,
                version=version,
                next_local_steps=said.next_local_steps,
                body_bytes=num_bytes,
                staleness=said.staleness,
                held_s=said.held_s,
                reason=said.reason,
                num_workers=said.num_workers,
                worker_index=said.worker_index,
                training_steps=said.training_steps,
                segment=segment_to_proto(segment),
            )
            return pb.ServerMessage(answer=answer)

        if said.has_weights:
            await deliver(self._engine, stream, peer, header, go)
        else:
            await stream.write(frame(header(said.version, 0, None)))
        peer.traffic.num_received, stream.num_sent = peer.traffic.num_received + stream.num_sent, 0

    async def _final(self, stream: Stream, peer: Peer, done: Done) -> None:
        def header(version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage:
            final = pb.Final(
                version=version, evaluate=done.evaluate, body_bytes=num_bytes, segment=segment_to_proto(segment)
            )
            return pb.ServerMessage(final=final)

        await deliver(self._engine, stream, peer, header, done)

    def handler(self) -> grpc.GenericRpcHandler:
        """Exchange and Pull in bytes, as `common/wire/frames.py` frames them."""
        handlers = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
            "Heartbeat": grpc.stream_stream_rpc_method_handler(
                self._queries.heartbeat,
                request_deserializer=pb.Beat.FromString,
                response_serializer=pb.Pulse.SerializeToString,
            ),
            "Attend": grpc.stream_stream_rpc_method_handler(
                self._queries.attend,
                request_deserializer=pb.ShardReport.FromString,
                response_serializer=pb.ShardOrder.SerializeToString,
            ),
            "Pull": grpc.unary_stream_rpc_method_handler(
                self._queries.pull,
                request_deserializer=pb.PullRequest.FromString,
            ),
            "Status": grpc.unary_unary_rpc_method_handler(
                self._queries.status,
                request_deserializer=pb.StatusRequest.FromString,
                response_serializer=pb.StatusReply.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


async def _read_model(message: pb.Model) -> tuple[Layout, OptimizerSpec]:
    """What a worker trains; nobody waits while one of very many tensors is read."""

    def read() -> tuple[Layout, OptimizerSpec]:
        layout = layout_from_proto(message.tensors)
        if message.fingerprint != layout.fingerprint:
            raise refusal(Reason.BAD_REQUEST, "Model.fingerprint does not belong to Model.tensors")
        return layout, optimizer_from_proto(message.optimizer, layout)

    is_large = message.ByteSize() > _LARGE_MODEL_BYTES
    return await asyncio.to_thread(read) if is_large else read()


def _rank(peer: Peer | None) -> int | None:
    return peer.rank if peer is not None else None


def _nothing() -> None:
    """The call is over."""


def _copy_into(view: memoryview) -> Callable[[int, memoryview], None]:

    def write(offset: int, data: memoryview) -> None:
        view[offset : offset + len(data)] = data

    return write
