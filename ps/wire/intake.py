"""Contributions come in: from frames of one worker's stream to events of the run.

A small one comes whole in the message that announces it; a large one in pieces, which may begin to come
before the facts that belong to it (`upload.py`).
"""

from __future__ import annotations

import asyncio
import functools
from functools import partial

from ...common.codecs.base import Codec, body_bytes
from ...common.errors import ParamServerError, Reason, refusal
from ...common.registry import CODECS
from ...common.tensors.layout import copy_of
from ...common.wire.frames import Frame, frame
from ...common.wire.protocol import hyperparameters_from_proto
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..core.judgement import Judgement
from ..engine.engine import Engine
from ..engine.peers import Peer
from ..tensors.staging import Body
from ..tensors.store import Store
from ..tensors.upload import Upload, decode
from .lanes.shared import taken
from .stream import Stream

_MAX_SAMPLES = 2**40
_SAY_WAITING_S = 1.0
# What a worker may send before the facts of its contribution, and after them.
_NEXT = ("contribution", "begin", "finish", "leave", "taken", "")
_PIECE = ("taken", "")


class Intake:
    """Takes contributions of any worker into one run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def next(self, stream: Stream, peer: Peer) -> Frame | None:
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
                    taken(self._engine, peer)
                    continue
                if received.kind == "contribution":
                    facts, header = received, received.of(pb.Contribution)
                    if header.repeat:
                        peer.state = "waiting"
                        self._engine.offer(events.Repeated(*peer.seat, header.step))
                        return received
                    self._check_facts(peer, header)
                    if upload is None and len(received.data) == header.body_bytes:
                        await self._take_whole(stream, peer, received)
                        return received
                if received.kind is not None:
                    upload = await self._open(stream, peer, received, upload)
                if upload is None:
                    raise refusal(Reason.BAD_REQUEST, "a piece of a body that no Begin or Contribution announced")
                upload.feed(received)
            judgement = await upload.judge()
            self._hand_over(stream, peer, facts.of(pb.Contribution), upload.take(), judgement)
            return facts
        finally:
            if upload is not None:
                upload.close()

    async def _take_whole(self, stream: Stream, peer: Peer, received: Frame) -> None:
        """A small contribution, whose body came with it."""
        header = received.of(pb.Contribution)
        store, codec = self._announced(peer, header)
        body = await self._borrow(stream, peer)
        staging = self._engine.model.staging
        try:
            if codec.is_identity:
                staging.bytes_of(body)[:] = received.data
                judgement = store.sanity.examine(body, store.weights)
            else:
                memory, encoded = self._engine.codec_memory(peer.rank), copy_of(received.data)
                judgement = await self._engine.tensors.run(partial(decode, store, memory, codec, encoded, body))
        except BaseException:
            self._engine.tensors.then(partial(staging.give_back, body))
            raise
        self._hand_over(stream, peer, header, body, judgement)

    def _check_facts(self, peer: Peer, header: pb.Contribution) -> None:
        if peer.reading is not None:
            raise refusal(Reason.BAD_REQUEST, "a Contribution before Taken: the last answer's segment is still lent")
        if not 1 <= header.num_samples <= _MAX_SAMPLES:
            raise refusal(Reason.BAD_REQUEST, f"num_samples is {header.num_samples}; it is 1 to {_MAX_SAMPLES}")
        self._engine.model.check_hyperparameters(hyperparameters_from_proto(header.hyperparameters))
        peer.state = "uploading"

    async def _open(self, stream: Stream, peer: Peer, received: Frame, upload: Upload | None) -> Upload:
        """The upload that a Begin or a Contribution announces, or that a Contribution belongs to."""
        header = received.of(pb.Begin) if received.kind == "begin" else received.of(pb.Contribution)
        store, codec = self._announced(peer, header)
        if upload is not None:
            if (upload.codec, upload.in_segment) != (codec, header.in_segment):
                raise refusal(Reason.BAD_REQUEST, "Begin and its Contribution differ in codec or in_segment")
            if received.kind == "begin":
                upload.restart()
            return upload
        memory = self._engine.codec_memory(peer.rank)
        if peer.segment is not None and header.in_segment:
            body = peer.segment.body[: store.layout.exchange_bytes]
            return Upload(store, self._engine.tensors, codec, body, lambda _: None, memory, in_segment=True)
        body = await self._borrow(stream, peer)
        return Upload(store, self._engine.tensors, codec, body, self._engine.model.staging.give_back, memory)

    def _announced(self, peer: Peer, header: pb.Begin | pb.Contribution) -> tuple[Store, Codec]:
        """The store and the codec of a body whose announcement has been checked."""
        if not self._engine.model.has_weights:
            raise refusal(Reason.NOT_JOINED, f"rank {peer.rank} has no weights to compute on yet")
        store = self._engine.model.store
        codec = codec_named(header.codec)
        num_bytes = body_bytes(codec, store.layout)
        if header.body_bytes != num_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"a contribution of {header.body_bytes} bytes; with codec '{codec.name}' this model's have {num_bytes}",
            )
        if header.in_segment and (peer.segment is None or not codec.is_identity):
            raise refusal(Reason.BAD_REQUEST, "a contribution in a segment that was not accepted, or not raw")
        return store, codec

    def _hand_over(self, stream: Stream, peer: Peer, header: pb.Contribution, body: Body, judgement: Judgement) -> None:
        """A whole contribution: let the run have it."""
        told = hyperparameters_from_proto(header.hyperparameters)
        peer.traffic.num_sent, stream.num_received = peer.traffic.num_sent + stream.num_received, 0
        event = events.Contributed(
            *peer.seat,
            header.step,
            header.base_version,
            header.num_samples,
            header.wants_weights,
            tuple(told) if told else None,
            judgement,
            header.loss,
            header.compute_s,
            header.transfer_s,
        )
        self._engine.contributed(event, body)
        peer.state = "waiting"

    async def _borrow(self, stream: Stream, peer: Peer) -> Body:
        """Memory for the upload; while there is none its bytes wait at the sender, who is told why."""
        policy, staging = self._engine.run.policy, self._engine.model.staging

        def position() -> int:
            return policy.upload_position(peer.rank)

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
def codec_named(name: str) -> Codec:
    """One of this program's codecs; empty is raw. Refuses BAD_REQUEST a name it does not know."""
    try:
        codec: Codec = CODECS.load(name or "raw")()
        return codec
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None
