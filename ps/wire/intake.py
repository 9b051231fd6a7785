"""Contributions come in: from frames of one worker's stream to events of the run.

A small one comes whole in the message that announces it; a large one in pieces, which may begin to come
before the facts that belong to it (`upload.py`).
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from ...common.codecs.base import Codec, body_bytes
from ...common.errors import ParamServerError, Reason, refusal
from ...common.registry import CODECS
from ...common.tensors.layout import copy_of
from ...common.wire.frames import Frame, frame
from ...common.wire.protocol import hyperparameters_from_proto
from ...proto import parameter_server_pb2 as pb
from ..core.judgement import Judgement
from ..core.run import Run
from ..policies.base import Contribution
from ..shards.alone import StagedPart
from ..tensors.staging import Body
from ..tensors.store import Store
from ..tensors.upload import Upload, decode
from .connected import Measured, Worker
from .delivery import taken
from .stream import Stream

_MAX_SAMPLES = 2**40
_SAY_WAITING_S = 1.0
# What a worker may send before the facts of its contribution, and after them.
_NEXT = ("contribution", "begin", "finish", "leave", "taken", "")
_PIECE = ("taken", "")


class Intake:
    """Takes contributions of any worker into one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def next(self, stream: Stream, worker: Worker) -> Frame | None:
        """Take one contribution and hand it to the run. Returns the Contribution, or the Finish or Leave
        that came instead; None when the stream ended before it was whole."""
        upload: Upload | None = None
        facts: Frame | None = None
        try:
            while facts is None or upload is None or not upload.is_complete:
                received = await stream.read(*(_NEXT if facts is None else _PIECE))
                if received is None or received.kind in ("finish", "leave"):
                    return received
                if received.kind == "taken":
                    taken(self._run, worker)
                    continue
                if received.kind == "contribution" and received.header.repeat:
                    self._run.ask_again(worker, received.header.step)
                    return received
                if received.kind == "contribution":
                    facts = received
                    self._check_facts(worker, received.header)
                    if upload is None and len(received.data) == received.header.body_bytes:
                        await self._take_whole(stream, worker, received)
                        return received
                if received.kind is not None:
                    upload = await self._open(stream, worker, received, upload)
                if upload is None:
                    raise refusal(Reason.BAD_REQUEST, "a piece of a body that no Begin or Contribution announced")
                upload.feed(received)
            self._run.contributions.uploaded(worker)
            judgement = await upload.judge()
            self._hand_over(stream, worker, facts.header, upload.take(), judgement)
            return facts
        finally:
            if upload is not None:
                upload.close()

    async def _take_whole(self, stream: Stream, worker: Worker, received: Frame) -> None:
        """A small contribution, whose body came with it."""
        store, codec = self._announced(worker, received.header)
        body = await self._borrow(stream, worker)
        self._run.contributions.uploaded(worker)
        if codec.name == "raw":
            self._run.model.staging.bytes_of(body)[:] = received.data
            judgement = store.sanity.examine(body, store.weights)
        else:
            judgement = decode(store, codec, copy_of(received.data), body)
        self._hand_over(stream, worker, received.header, body, judgement)

    def _check_facts(self, worker: Worker, header: Any) -> None:
        if worker.reading is not None:
            raise refusal(Reason.BAD_REQUEST, "a Contribution before Taken: the last answer's segment is still lent")
        if not 1 <= header.num_samples <= _MAX_SAMPLES:
            raise refusal(Reason.BAD_REQUEST, f"num_samples is {header.num_samples}; it is 1 to {_MAX_SAMPLES}")
        self._run.model.check_hyperparameters(hyperparameters_from_proto(header.hyperparameters))
        worker.state = "uploading"

    async def _open(self, stream: Stream, worker: Worker, received: Frame, upload: Upload | None) -> Upload:
        """The upload that a Begin or a Contribution announces, or that a Contribution belongs to."""
        header = received.header
        store, codec = self._announced(worker, header)
        if upload is not None:
            if (upload.codec, upload.in_segment) != (codec, header.in_segment):
                raise refusal(Reason.BAD_REQUEST, "Begin and its Contribution differ in codec or in_segment")
            if received.kind == "begin":
                upload.restart()
            return upload
        if worker.segment is not None and header.in_segment:
            body = worker.segment.body[: store.layout.exchange_bytes]
            return Upload(store, self._run.tensors, codec, body, lambda _: None, in_segment=True)
        body = await self._borrow(stream, worker)
        return Upload(store, self._run.tensors, codec, body, self._run.model.staging.give_back)

    def _announced(self, worker: Worker, header: Any) -> tuple[Store, Codec]:
        """The store and the codec of a body whose announcement has been checked."""
        store = self._run.contributions.check(worker)
        codec = _codec(header.codec)
        num_bytes = body_bytes(codec, store.layout)
        if header.body_bytes != num_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"a contribution of {header.body_bytes} bytes; with codec '{codec.name}' this model's have {num_bytes}",
            )
        if header.in_segment and (worker.segment is None or codec.name != "raw"):
            raise refusal(Reason.BAD_REQUEST, "a contribution in a segment that was not accepted, or not raw")
        return store, codec

    def _hand_over(self, stream: Stream, worker: Worker, header: Any, body: Body, judgement: Judgement) -> None:
        """A whole contribution: let the run have it."""
        if header.hyperparameters:
            worker.hyperparameters = hyperparameters_from_proto(header.hyperparameters)
        worker.wants_weights = header.wants_weights
        worker.stats.bytes_sent, stream.num_received = worker.stats.bytes_sent + stream.num_received, 0
        contribution = Contribution(header.step, header.base_version, header.num_samples)
        told = Measured(header.loss, header.compute_s, header.transfer_s, header.skew)
        self._run.shards.staged(worker, StagedPart(contribution, body, judgement, told))

    async def _borrow(self, stream: Stream, worker: Worker) -> Body:
        """Memory for the upload; while there is none its bytes wait at the sender, who is told why."""
        policy, staging = self._run.policy, self._run.model.staging

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


@functools.cache
def _codec(name: str) -> Any:
    try:
        return CODECS.load(name or "raw")()
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None
