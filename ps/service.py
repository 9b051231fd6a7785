"""The service translates: frames from workers into events of the run, its answers into frames.

One coroutine per worker reads and writes that worker's stream in turn; the end of the
coroutine, for whatever reason, is the worker's leaving.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from ..common.config import Config
from ..common.errors import ParamServerError, Reason, refusal
from ..common.layout import as_bytes, new_body
from ..common.log import get_logger
from ..common.protocol import (
    SERVICE,
    hyperparameters_from_proto,
    layout_from_proto,
    layout_to_proto,
    optimizer_from_proto,
    refusal_to_status,
    struct,
)
from ..common.registry import CODECS
from ..common.wire import Frame, body_frames, frame
from ..proto import parameter_server_pb2 as pb
from . import reports
from .connected import Done, Go, Measured, Refused, SendWeights, Waiting, Worker
from .policies.base import Contribution
from .run import Run
from .staging import Body
from .stream import Stream, StreamLost

log = get_logger()

_MAX_SAMPLES = 2**40
_SAY_WAITING_S = 1.0


class ParameterServerService:
    """Implements the proto's service on one `Run`."""

    def __init__(self, run: Run, config: Config) -> None:
        self._run = run
        self._config = config

    # ---- Exchange ---------------------------------------------------------------------------

    async def exchange(self, _: AsyncIterator[bytes], context: Any) -> None:
        """A worker's whole life in the run."""
        stream = Stream(context)
        worker: Worker | None = None
        reason = "connection lost"
        try:
            worker = await self._welcome(stream)
            if worker is not None and (task := asyncio.current_task()) is not None:
                worker.interrupt = task.cancel
            if worker is not None and await self._send_outbox(stream, worker):
                said_goodbye = await self._contributions(stream, worker)
                reason = "said goodbye" if said_goodbye else reason
            await stream.flush()
        except StreamLost:
            pass
        except ParamServerError as error:
            reason = error.message
            await self._refuse(context, worker, error)
        except asyncio.CancelledError:
            # Either the connection is gone, or the run has something to say that cannot wait.
            if worker is None or (refused := worker.pending_refusal()) is None:
                raise
            reason = refused.message
            await self._refuse(context, worker, refused)
        finally:
            stream.abandon()
            if worker is not None:
                self._run.leave(worker, reason)

    async def _welcome(self, stream: Stream) -> Worker | None:
        timeout_s = self._config.server.join_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                first = await stream.read("join")
        except TimeoutError:
            raise refusal(Reason.BAD_REQUEST, f"no Join within {timeout_s:g} s (server.join_timeout_s)") from None
        if first is None:
            return None
        join = first.header
        rank = join.rank if join.rank >= 0 else None
        worker = self._run.join(rank, join.incarnation, join.run, host=join.host, pid=join.pid, device=join.device)
        try:
            welcome = pb.Welcome(
                run=self._run.name,
                rank=worker.rank,
                incarnation=worker.seat.incarnation,
                step=self._run.policy.last_step.get(worker.rank, 0),
                settings=self._settings(),
            )
            await stream.write(frame(pb.ServerMessage(welcome=welcome)))
            second = await stream.read("model", "leave")
            if second is None or second.kind == "leave":
                self._run.leave(worker, "said goodbye")
                return None
            layout = layout_from_proto(second.header.tensors)
            if second.header.fingerprint != layout.fingerprint:
                raise refusal(Reason.BAD_REQUEST, "Model.fingerprint does not belong to Model.tensors")
            self._run.offer(worker, layout, optimizer_from_proto(second.header.optimizer, layout))
        except BaseException as error:
            self._run.leave(worker, getattr(error, "message", "connection lost"))
            raise
        return worker

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
            pull_every=config.policy.pull_every if policy.may_skip_pulls else 1,
            task=task,
            task_args=struct(config.task.args),
            optimizer=pb.Optimizer(
                name=config.optimizer.name,
                groups=[pb.ParameterGroup(hyperparameters=struct(config.optimizer.arguments()))],
            ),
            polyak=config.store.polyak or 0.0,
        )

    async def _contributions(self, stream: Stream, worker: Worker) -> bool:
        """Exchange until the worker goes; True when it said goodbye."""
        while True:
            first = await stream.read("contribution", "finish", "leave")
            if first is None or first.kind == "leave":
                return first is not None
            if first.kind == "finish":
                self._run.finish(worker, first.header.transfer_s, first.header.can_evaluate)
                if not await self._send_outbox(stream, worker):
                    return False
                goodbye = await stream.read("leave")
                if goodbye is not None:
                    self._run.report(worker, dict(goodbye.header.metrics))
                return goodbye is not None
            if not await self._contribution(stream, worker, first) or not await self._send_outbox(stream, worker):
                return False

    async def _contribution(self, stream: Stream, worker: Worker, first: Frame) -> bool:
        """Stage one contribution and hand it to the run; False when the stream ended in the middle."""
        run, header = self._run, first.header
        layout = run.check_contribution(worker).layout
        codec = _codec(header.codec)
        encoded_bytes = codec.encoded_bytes(layout)
        num_bytes = encoded_bytes + layout.exchange_bytes - layout.parameter_bytes
        if header.body_bytes != num_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"a contribution of {header.body_bytes} bytes; with codec '{codec.name}' this model's have {num_bytes}",
            )
        if not 1 <= header.num_samples <= _MAX_SAMPLES:
            raise refusal(Reason.BAD_REQUEST, f"num_samples is {header.num_samples}; it is 1 to {_MAX_SAMPLES}")
        told_hyperparameters = hyperparameters_from_proto(header.hyperparameters)
        run.check_hyperparameters(told_hyperparameters)
        worker.state = "uploading"
        body = await self._borrow(stream, worker)
        whole = False
        try:
            staged = body if codec.name == "raw" else new_body(num_bytes)
            whole = await stream.read_body(first, num_bytes, _copy_into(as_bytes(staged)))
        finally:
            if not whole:
                run.staging.give_back(body)
        if not whole:
            return False
        if staged is not body:
            codec.decode(layout, staged[:encoded_bytes], body)
            body[layout.parameter_bytes :].copy_(staged[encoded_bytes:])
        if told_hyperparameters:
            worker.hyperparameters = told_hyperparameters
        worker.wants_weights = header.wants_weights
        worker.stats.bytes_sent, stream.num_received = worker.stats.bytes_sent + stream.num_received, 0
        contribution = Contribution(header.step, header.base_version, header.num_samples)
        told = Measured(header.loss, header.compute_s, header.transfer_s)
        await run.contribute(worker, contribution, body, told)
        return True

    async def _borrow(self, stream: Stream, worker: Worker) -> Body:
        """Memory for the upload; while there is none its bytes wait at the sender, who is told why."""
        policy, staging = self._run.policy, self._run.staging

        def position() -> int:
            return policy.upload_position(worker.rank)

        body = staging.try_borrow(position)
        if body is not None:
            return body
        borrowing = asyncio.ensure_future(staging.borrow(position))
        try:
            while not (await asyncio.wait({borrowing}, timeout=_SAY_WAITING_S))[0]:
                reason = f"memory for the upload; {position()} contributions are folded before it"
                await stream.write(frame(pb.ServerMessage(waiting=pb.Waiting(reason=reason))))
            return borrowing.result()
        except BaseException:
            if not borrowing.cancel() and not borrowing.cancelled():
                staging.give_back(borrowing.result())  # it came in the moment the call was cancelled
            raise

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
                    await self._final(stream, item)
                    return True

    async def _take_initial_weights(self, stream: Stream, worker: Worker) -> bool:
        await stream.write(frame(pb.ServerMessage(send_weights=pb.SendWeights())))
        first = await stream.read("initial_weights")
        if first is None:
            return False
        layout = self._run.layout
        assert layout is not None
        if first.header.body_bytes != layout.total_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"initial weights of {first.header.body_bytes} bytes; this model's have {layout.total_bytes}",
            )
        weights = new_body(layout.total_bytes)
        if not await stream.read_body(first, layout.total_bytes, _copy_into(as_bytes(weights))):
            return False
        self._run.initialise(worker, weights)
        return True

    async def _answer(self, stream: Stream, worker: Worker, go: Go) -> None:
        is_start = go.outcome == "START"
        wants_weights = worker.wants_weights or go.outcome != "APPLIED"
        reply = await self._run.replies.get(go.min_version) if wants_weights else None
        num_workers, index = self._run.division(worker)
        answer = pb.Answer(
            outcome=go.outcome,
            step=self._run.policy.last_step.get(worker.rank, 0),
            version=reply.version if reply is not None else go.min_version,
            next_local_steps=self._run.policy.next_local_steps(worker.rank),
            staleness=go.staleness,
            held_s=go.held_s,
            reason=go.reason,
            num_workers=num_workers,
            worker_index=index,
            training_steps=self._run.policy.steps_done(worker.rank),
        )
        await self._send_body(stream, lambda size: _with_size(pb.ServerMessage(answer=answer), size), reply, is_start)
        worker.stats.bytes_received, stream.num_sent = worker.stats.bytes_received + stream.num_sent, 0

    async def _final(self, stream: Stream, done: Done) -> None:
        reply = await self._run.replies.get(done.min_version)
        final = pb.Final(version=reply.version, evaluate=done.evaluate)
        await self._send_body(stream, lambda size: _with_size(pb.ServerMessage(final=final), size), reply, False)

    async def _send_body(
        self, stream: Stream, header: Callable[[int], pb.ServerMessage], reply: Any, with_frozen: bool
    ) -> None:
        """`header` with the size of the body, then the shared frames of `reply`, then what never changes."""
        if reply is None:
            await stream.write(frame(header(0)))
            return
        layout = self._run.store.layout  # type: ignore[union-attr]
        message = header(layout.total_bytes if with_frozen else reply.num_bytes)
        await stream.write(frame(message, 0, [reply.inline] if reply.inline is not None else []))
        for raw in reply.frames:
            await stream.write(raw)
        if with_frozen:
            for raw in self._run.replies.frozen_frames():
                await stream.write(raw)

    async def _refuse(self, context: Any, worker: Worker | None, error: ParamServerError) -> None:
        rank = worker.rank if worker is not None else None
        log.warning("refused", rank=rank, reason=(error.reason or Reason.BAD_REQUEST).value, message=error.message)
        code, details, metadata = refusal_to_status(error)
        await context.abort(code, details, metadata)

    # ---- Pull and Status --------------------------------------------------------------------------

    async def pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[bytes]:
        """The weights of one version, or their Polyak average, whole."""
        run = self._run
        try:
            if run.store is None:
                raise refusal(Reason.NOT_READY, "there are no weights yet", fix="try again once training has started")
            store = run.store
            if request.averaged and store.averaged is None:
                raise refusal(
                    Reason.BAD_REQUEST,
                    "no averaged weights are kept",
                    fix="start ps-server with --set store.polyak=0.999",
                )
            source = store.averaged if request.averaged else store.weights
            version, body = await run.tensors.run(lambda: (store.version, source.clone()))  # type: ignore[union-attr]
        except ParamServerError as error:
            await self._refuse(context, None, error)
            return
        snapshot = pb.Snapshot(
            run=run.name, version=version, body_bytes=body.numel(), tensors=layout_to_proto(store.layout)
        )
        yield frame(pb.ServerMessage(snapshot=snapshot))
        for raw in body_frames([as_bytes(body)]):
            yield raw

    async def status(self, _: pb.StatusRequest, context: Any) -> pb.StatusReply:
        status = reports.status(self._run)
        workers = [
            pb.WorkerStatus(**{**row, "loss": row["loss"] if row["loss"] is not None else float("nan")})
            for row in status.pop("workers")
        ]
        status.pop("num_joined")
        return pb.StatusReply(run=self._run.name, workers=workers, **status)

    def handler(self) -> grpc.GenericRpcHandler:
        """Exchange and Pull in bytes, as `common/wire.py` frames them."""
        handlers = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
            "Pull": grpc.unary_stream_rpc_method_handler(
                self.pull,
                request_deserializer=pb.PullRequest.FromString,
            ),
            "Status": grpc.unary_unary_rpc_method_handler(
                self.status,
                request_deserializer=pb.StatusRequest.FromString,
                response_serializer=pb.StatusReply.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


@functools.cache
def _codec(name: str) -> Any:
    try:
        return CODECS.load(name or "raw")()
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None


def _copy_into(view: memoryview) -> Callable[[int, memoryview], None]:

    def write(offset: int, data: memoryview) -> None:
        view[offset : offset + len(data)] = data

    return write


def _with_size(message: pb.ServerMessage, num_bytes: int) -> pb.ServerMessage:
    getattr(message, message.WhichOneof("kind")).body_bytes = num_bytes
    return message
