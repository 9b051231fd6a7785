"""The service translates: frames from workers into events of the run, its answers into frames.

One coroutine per worker reads and writes that worker's stream in turn; the end of the
coroutine, for whatever reason, is the worker's leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
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
    segment_from_proto,
    segment_to_proto,
    struct,
)
from ...common.wire.segments import Segment, SegmentAddress, SegmentError, new_segment, open_segment
from ...proto import parameter_server_pb2 as pb
from ..core.roster import Asked
from ..core.run import Run
from .connected import Done, Go, Refused, SendWeights, Waiting, Worker
from .delivery import deliver, taken
from .intake import Intake
from .limits import Joins, Watch
from .queries import Queries
from .refusing import fail, loggable, refuse
from .security import check_rank
from .stream import Stream, StreamLost

log = get_logger()

_PROBE_BYTES = 4096
# A larger description of a model is read beside the event loop: about 10 us for each of its tensors.
_LARGE_MODEL_BYTES = 64 << 10
_SAY_WAITING_S = 1.0
_LOOK_S = 0.05


class ParameterServerService:
    """Implements the proto's service on one `Run`."""

    def __init__(self, run: Run, config: Config) -> None:
        self._run = run
        self._config = config
        self._intake = Intake(run)
        self._watch = Watch()
        self._joins = Joins(config.limits.joins_per_s, config.run.workers or config.limits.workers)
        self._queries = Queries(run, config, self._stream)
        self._probe: Segment | None = None
        if config.server.shared_memory:
            with contextlib.suppress(SegmentError):
                self._probe = new_segment(_PROBE_BYTES)

    # ---- Exchange ---------------------------------------------------------------------------

    async def exchange(self, _: AsyncIterator[bytes], context: Any) -> None:
        """A worker's whole life in the run."""
        stream = self._stream(context)
        worker: Worker | None = None
        refused: ParamServerError | None = None
        try:
            worker = await self._welcome(stream, context)
            if worker is not None and (task := asyncio.current_task()) is not None:
                worker.interrupt = task.cancel
            if (
                worker is not None
                and (worker.resumes or await self._send_outbox(stream, worker))
                and await self._contributions(stream, worker)
            ):
                self._run.leave(worker, "said goodbye", how="goodbye")
            await stream.flush()
        except StreamLost:
            pass
        except ParamServerError as error:
            refused = error
            traceback.clear_frames(error.__traceback__)
            await refuse(stream, _rank(worker), error)
        except asyncio.CancelledError as cancelled:
            # The call's task keeps them, and they hold an upload: memory a worker shared would stay mapped.
            traceback.clear_frames(cancelled.__traceback__)
            # Either the connection is gone, or there is something to say that cannot wait.
            refused = stream.too_slow or (worker.pending_refusal() if worker is not None else None)
            if refused is None:
                raise
            await refuse(stream, _rank(worker), refused)
        except Exception as error:
            refused = ParamServerError(f"the server failed on what it was sent: {type(error).__name__}")
            await fail(stream, _rank(worker), error)
        finally:
            stream.close()
            if worker is not None:
                taken(self._run, worker)
                if refused is not None:
                    self._run.leave(worker, loggable(refused.message))
                else:
                    self._run.stream_ended(worker, "connection lost")
                # The call's traceback and the worker hold each other: let go of what is large at once.
                worker.segment, worker.interrupt = None, _nothing

    def _stream(self, context: Any) -> Stream:
        model = self._run.model
        return Stream(
            context,
            self._config.limits,
            self._watch,
            lambda: model.has_weights and model.staging.num_waiting > 0,
        )

    async def _welcome(self, stream: Stream, context: Any) -> Worker | None:
        first = await self._read_in_time(stream, "join")
        if first is None:
            return None
        join = first.header
        rank = check_rank(context, join.rank if join.rank >= 0 else None)
        asked = Asked(
            rank, join.run, join.incarnation, join.server_incarnation, join.process, join.seated, join.resumed
        )
        await self._wait_turn(stream)
        await self._wait_for_shards(stream)
        worker = self._run.join(asked, host=join.host, pid=join.pid, device=join.device)
        try:
            welcome = pb.Welcome(
                run=self._run.name,
                rank=worker.rank,
                incarnation=worker.seat.incarnation,
                step=self._run.policy.num_counted.get(worker.rank, 0),
                settings=self._settings(),
                probe=segment_to_proto(self._probe.address if self._probe is not None else None),
                server_incarnation=self._run.incarnation,
                resumed=worker.resumes,
                lease_s=self._config.server.lease_s,
                shards=self._run.shards.addresses,
            )
            await stream.write(frame(pb.ServerMessage(welcome=welcome)))
            second = await self._read_in_time(stream, "model", "leave")
            if second is None:
                self._run.stream_ended(worker, "connection lost")
                return None
            if second.kind == "leave":
                self._run.leave(worker, "said goodbye", how="goodbye")
                return None
            layout, optimizer = await _read_model(second.header)
            if second.header.HasField("segment"):
                share = self._run.model.share_of(layout)
                await self._share(stream, worker, share.layout, segment_from_proto(second.header.segment))
            self._run.offer(worker, layout, optimizer)
        except ParamServerError as error:
            self._run.leave(worker, error.message)
            raise
        except BaseException:
            self._run.stream_ended(worker, "connection lost")
            raise
        return worker

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
        while reason := self._run.shards.missing():
            await stream.write(frame(pb.ServerMessage(waiting=pb.Waiting(reason=reason))))
            for _ in range(round(_SAY_WAITING_S / _LOOK_S)):
                if not self._run.shards.missing():
                    break
                await asyncio.sleep(_LOOK_S)

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

    async def _share(self, stream: Stream, worker: Worker, layout: Layout, address: SegmentAddress) -> None:
        """Try to open the worker's segment, and say how it went."""
        reason, worker.stats.lane = "", "tcp"
        try:
            if self._probe is None:
                raise SegmentError("the server shares no memory (server.shared_memory)")
            if address.num_bytes < layout.exchange_bytes:
                raise SegmentError(f"{address.num_bytes} bytes, a contribution has {layout.exchange_bytes}")
            worker.segment = open_segment(address)
            worker.stats.lane = "shared memory"
        except SegmentError as error:
            reason = str(error)
            log.info("not_shared", rank=worker.rank, reason=reason)
        verdict = pb.SharedMemory(accepted=worker.segment is not None, reason=reason)
        await stream.write(frame(pb.ServerMessage(shared_memory=verdict)))

    def _settings(self) -> pb.RunSettings:
        config, policy = self._config, self._run.policy
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

    async def _contributions(self, stream: Stream, worker: Worker) -> bool:
        """Exchange until the worker goes; True when it said goodbye."""
        while True:
            received = await self._intake.next(stream, worker)
            if received is None or received.kind == "leave":
                return received is not None
            if received.kind == "finish":
                self._run.finish(worker, received.header.transfer_s, received.header.can_evaluate)
                if not await self._send_outbox(stream, worker):
                    return False
                while (goodbye := await stream.read("leave", "taken")) is not None and goodbye.kind == "taken":
                    taken(self._run, worker)
                if goodbye is not None:
                    self._run.report(worker, dict(goodbye.header.metrics))
                return goodbye is not None
            if not await self._send_outbox(stream, worker):
                return False

    # ---- what the run says to a worker ----------------------------------------------------------

    async def _send_outbox(self, stream: Stream, worker: Worker) -> bool:
        """Send until the worker may go on; False when its stream ended instead."""
        while True:
            item = await worker.outbox.get()
            match item:
                case Waiting(reason):
                    await stream.write(frame(pb.ServerMessage(waiting=pb.Waiting(reason=reason))))
                case SendWeights():
                    if not await self._take_initial_weights(stream, worker):
                        return False
                case Refused(error):
                    raise error
                case Go():
                    await self._answer(stream, worker, item)
                    return True
                case Done():
                    await self._final(stream, worker, item)
                    return True

    async def _take_initial_weights(self, stream: Stream, worker: Worker) -> bool:
        await stream.write(frame(pb.ServerMessage(send_weights=pb.SendWeights())))
        first = await self._read_in_time(stream, "initial_weights")
        if first is None:
            return False
        layout = self._run.model.layout
        assert layout is not None
        if first.header.body_bytes != layout.total_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"initial weights of {first.header.body_bytes} bytes; this model's have {layout.total_bytes}",
            )
        try:
            weights = self._run.model.new_memory()
        except (MemoryError, RuntimeError):  # numpy's and torch's
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"no memory for a model of {layout.total_bytes:,} bytes",
                fix="give the server more memory; limits.model_bytes is what it promises to take",
            ) from None
        if not await stream.read_body(first, layout.total_bytes, _copy_into(weights.bytes)):
            return False
        self._run.initialise(worker, weights)
        return True

    async def _answer(self, stream: Stream, worker: Worker, go: Go) -> None:
        policy = self._run.policy
        num_workers, index = self._run.division(worker)

        def header(version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage:
            answer = pb.Answer(
                outcome=go.outcome,
                step=policy.num_counted.get(worker.rank, 0),
                version=version,
                next_local_steps=policy.next_local_steps(worker.rank),
                body_bytes=num_bytes,
                staleness=go.staleness,
                held_s=go.held_s,
                reason=go.reason,
                num_workers=num_workers,
                worker_index=index,
                training_steps=policy.steps_done(worker.rank),
                segment=segment_to_proto(segment),
            )
            return pb.ServerMessage(answer=answer)

        if worker.gets_weights(go.outcome):
            await deliver(self._run, stream, worker, header, go.min_version, with_frozen=go.outcome == "START")
        else:
            await stream.write(frame(header(go.min_version, 0, None)))
        worker.stats.bytes_received, stream.num_sent = worker.stats.bytes_received + stream.num_sent, 0

    async def _final(self, stream: Stream, worker: Worker, done: Done) -> None:
        def header(version: int, num_bytes: int, segment: SegmentAddress | None) -> pb.ServerMessage:
            final = pb.Final(
                version=version, evaluate=done.evaluate, body_bytes=num_bytes, segment=segment_to_proto(segment)
            )
            return pb.ServerMessage(final=final)

        await deliver(self._run, stream, worker, header, done.min_version)

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


def _rank(worker: Worker | None) -> int | None:
    return worker.rank if worker is not None else None


def _nothing() -> None:
    """The call is over."""


def _copy_into(view: memoryview) -> Callable[[int, memoryview], None]:

    def write(offset: int, data: memoryview) -> None:
        view[offset : offset + len(data)] = data

    return write
