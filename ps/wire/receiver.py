"""Receives one worker's contributions, and turns the messages of its stream into events of the run.

A small contribution is complete in the message that announces it. A large payload arrives in pieces. The first pieces
may arrive before the contribution that they belong to (`upload.py`).
"""

from __future__ import annotations

import math
from functools import partial

from ...common.codecs.base import Codec, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.errors import CheckpointError, Reason, refusal
from ...common.tensors.judgement import SOUND, Judgement
from ...common.wire.frames import Frame
from ...common.wire.messages import read_contribution
from ...common.wire.records import Contribution, PayloadInfo
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..engine.engine import Engine
from ..engine.folding import Peer, Staged
from ..snapshots.store_state import read_optimizer
from ..tensors.flat_optimizer import OptimizerState
from ..tensors.staging import Payload
from ..tensors.store import Rows, Store
from ..tensors.upload import Upload
from .delivery import Transport
from .joining import codec_named, unusable
from .partial_transfers import PartialTransfers
from .stream import Stream, StreamLost

_MAX_NAME, _MAX_FAILURE = 100, 500  # characters
_MAX_METRICS = 64  # of an evaluation
# Bounds of an optimizer's state: a multiple of the parameters' bytes, and bytes for names.
_MAX_KEYS, _MORE_BYTES = 8, 1 << 20
# Messages that may precede a contribution, replace it, or carry its payload. "" is a piece without a header.
_BEFORE = ("begin", "rows", "optimizer", "state", "metrics", "stop", "taken", "")
_INSTEAD = ("ask_again", "finish", "leave")
_PIECE = ("taken", "")


class StateAssembler:
    """Joins the bytes of consecutive State messages."""

    def __init__(self) -> None:
        self.num_bytes, self._data = 0, bytearray()

    def add(self, message: pb.State) -> None:
        """Append a piece. Raises a BAD_REQUEST refusal if it does not follow the previous pieces."""
        if not message.offset:
            self.num_bytes, self._data = message.num_bytes, bytearray()
        if message.num_bytes != self.num_bytes or message.offset != len(self._data):
            problem = f"a piece of a State at {message.offset} that does not follow {len(self._data)}"
            raise refusal(Reason.BAD_REQUEST, problem)
        self._data += message.piece

    def check_complete(self) -> None:
        """Raise a BAD_REQUEST refusal if pieces are missing."""
        if len(self._data) < self.num_bytes:
            problem = f"a Contribution after {len(self._data)} of {self.num_bytes} bytes of a State"
            raise refusal(Reason.BAD_REQUEST, problem)

    def take(self) -> bytes | None:
        """Return the whole state and start over, or None if the state has not arrived completely."""
        if not self._data or len(self._data) < self.num_bytes:
            return None
        data, self._data, self.num_bytes = bytes(self._data), bytearray(), 0
        return data


class Receiver:
    """Receives one worker's contributions, one after another, and offers them to the run.

    Each needs memory of the staging pool. Attachments (rows, optimizer state) may arrive before the payload is
    announced. The first one reserves the memory of the payload. So a contribution with attachments counts once in
    `server.max_staged`.
    """

    def __init__(
        self, engine: Engine, stream: Stream, peer: Peer, transport: Transport, partials: PartialTransfers
    ) -> None:
        self._stream, self._peer, self._transport, self._partials = stream, peer, transport, partials
        self._seat = peer.seat
        self._run, self._model, self._tensors = engine.run, engine.model, engine.tensors
        self._folding, self._offer, self._now = engine.folding, engine.offer, engine.now
        self._max_state_bytes = engine.config.limits.state_bytes
        # The number of contributions that will be folded before the next one of this worker.
        self._position = partial(self._run.policy.upload_position, peer.rank)
        self._reserved: Payload | None = None  # memory for the payload of a contribution whose attachments came first
        self._rows: list[Rows] = []  # attached to the next contribution, as is `_optimizer`
        self._optimizer: OptimizerState | None = None  # after the worker's step
        self._optimizer_state, self._script_state = StateAssembler(), StateAssembler()
        self._contribution: Contribution | None = None  # announced, and its payload is arriving
        self._upload: Upload | None = None
        self._without: frozenset[str] = frozenset()  # names of parameters that have no gradient in this contribution
        self._rejected = ""  # why the mode or optimizer excludes the codec of this upload; "": it may be used

    async def next(self) -> Frame:
        """Receive one complete contribution, and offer it to the run.

        Returns the contribution's last message, or an AskAgain, Finish or Leave that arrived instead.
        """
        self._contribution = self._upload = None
        is_lost = True
        try:
            while True:
                kinds = _PIECE if self._contribution is not None else ("contribution", *_BEFORE, *_INSTEAD)
                received = await self._stream.read(*kinds)
                if await self._take(received):
                    return received
        except Exception as error:
            is_lost = isinstance(error, StreamLost)
            raise
        finally:
            if (upload := self._upload) is not None:
                announced = self._contribution if is_lost else None
                if announced is None or not self._partials.keep(self._peer, announced.id.seq, upload):
                    upload.close()
            if (reserved := self._reserved) is not None:
                self._reserved = None
                self._model.staging.give_back(reserved)

    def take_now(self, received: Frame) -> bool:
        """Receive a contribution that is complete in one message, between two calls of `next`.

        Returns False for other messages, and for a contribution that has to wait for memory.
        """
        header = received.header
        return isinstance(header, pb.Contribution) and self._take_whole(self._announced(header), received)

    # ---- messages ---------------------------------------------------------------------------------

    async def _take(self, received: Frame) -> bool:
        """Handle one message. Returns True if a contribution is complete, or if a message arrived instead of it."""
        peer = self._peer
        match received.header:
            case None:
                return await self._take_piece(received)
            case pb.Contribution() | pb.Begin() if not self._model.has_weights:
                raise refusal(Reason.NOT_JOINED, f"rank {peer.rank} has no weights to compute on yet")
            case pb.Contribution() as header:
                contribution = self._announced(header)
                if self._upload is None and self._take_whole(contribution, received):
                    return True
                self._contribution = contribution
                self._upload = await self._expected(contribution.payload)
                return await self._take_piece(received)
            case pb.Begin() as begin:
                if begin.continues:
                    self._continue(begin)
                else:
                    self._upload = await self._expected(begin)
                    self._upload.restart()
                return await self._take_piece(received)
            case pb.Rows() as rows:
                if not (self._model.has_weights and self._model.store.tables):
                    raise refusal(Reason.BAD_REQUEST, "rows of a run that has no tables yet, or none at all")
                await self._reserve()
                tables = self._model.store.tables
                self._rows.append(tables.read(rows.table, rows.count, received.data, self._rows))
            case pb.State() as state if received.kind == "optimizer":
                await self._take_optimizer(state)
            case pb.State() as state:
                limit = self._max_state_bytes
                if state.num_bytes > limit:
                    problem = f"the script of rank {peer.rank} has a state (session.state) of {state.num_bytes:,} bytes"
                    fix = "pass less to session.state(), or start ps-server with --set limits.state_bytes=..."
                    accepts = f"this server accepts {limit:,} (limits.state_bytes)"
                    raise refusal(Reason.LIMIT_EXCEEDED, f"{problem}; {accepts}", fix=fix)
                self._script_state.add(state)
            case pb.Metrics() as metrics:
                self._offer(metrics_event(peer.rank, metrics))
            case pb.Stop() as stop:
                self._offer(events.StopAsked(*peer.seat, stop.reason))
            case pb.Taken():
                self._transport.taken()
            case pb.AskAgain() as question:
                peer.state, peer.base, peer.reference = "waiting", None, question.reference
                self._offer(events.AskedAgain(*peer.seat, question.seq))
        return received.kind in _INSTEAD

    def _take_whole(self, contribution: Contribution, received: Frame) -> bool:
        """Handle a contribution without payload, or with a complete raw payload. Otherwise return False.

        Also returns False if there is no free memory.
        """
        if not contribution.kind.has_payload:
            self._hand_over(contribution, None, SOUND)
            return True
        store, codec = self._check(contribution.payload)
        is_whole = codec.is_identity and len(received.data) == contribution.payload.num_bytes
        payload = self._try_borrow() if is_whole else None
        if payload is None:
            return False
        self._model.staging.bytes_of(payload)[:] = received.data
        self._hand_over(contribution, payload, store.sanity.examine(payload, store.weights))
        return True

    async def _take_piece(self, received: Frame) -> bool:
        upload, contribution = self._upload, self._contribution
        if upload is None:
            raise refusal(Reason.BAD_REQUEST, "a piece of a payload that no Begin or Contribution announced")
        target = upload.target[received.offset :][: received.out_of_band]
        follows = upload.in_segment and self._transport.segment is None  # the piece follows on the direct connection
        if follows and 0 < len(target) == received.out_of_band:
            at = received.offset
            async for num_bytes in self._stream.receive_into(target):  # if the stream is lost, these have arrived
                upload.reader.feed(received._replace(offset=at, out_of_band=num_bytes))
                at += num_bytes
        else:
            upload.reader.feed(received)
        if contribution is None or not upload.reader.is_complete:
            return False
        whole_at = self._now()
        judgement = await upload.judge()
        self._hand_over(contribution, upload.take(), judgement, self._now() - whole_at)
        return True

    async def _take_optimizer(self, state: pb.State) -> None:
        """Add a piece of the optimizer's state. Raises a BAD_REQUEST refusal if it does not fit this model."""
        model, rank = self._model, self._peer.rank
        limit = _MAX_KEYS * model.layout.parameter_bytes + _MORE_BYTES if model.has_weights else 0
        if not model.has_weights or state.num_bytes > limit:
            problem = f"rank {rank}: {state.num_bytes:,} bytes of an optimizer of this model"
            raise refusal(Reason.BAD_REQUEST, problem)
        await self._reserve()
        self._optimizer_state.add(state)
        if (data := self._optimizer_state.take()) is not None:
            try:
                self._optimizer = await self._tensors.run(partial(read_optimizer, model, data))
            except CheckpointError as error:
                problem = f"the optimizer state of rank {rank}: {error.message}"
                raise refusal(Reason.BAD_REQUEST, problem) from None

    # ---- memory -----------------------------------------------------------------------------------

    async def _reserve(self) -> None:
        """Borrow memory before an attachment is stored, unless this contribution has memory already."""
        if self._upload is None and self._reserved is None and not self._partials.has(self._peer.rank):
            self._reserved = await self._borrow()

    def _try_borrow(self) -> Payload | None:
        """Return the reserved payload, or a free one of the pool, or None if there is none."""
        payload, self._reserved = self._reserved, None
        return self._model.staging.try_borrow(self._position()) if payload is None else payload

    async def _borrow(self) -> Payload:
        """Return a payload, as `_try_borrow` does. If there is none, drops kept partial transfers and waits.

        Meanwhile the server sends the worker the reason.
        """
        staging = self._model.staging
        self._partials.drop(self._peer.rank)
        if (payload := self._try_borrow()) is not None:
            return payload
        self._partials.drop()
        request = staging.request(self._position)
        try:
            return await self._stream.wait(
                request, lambda: f"memory for the upload; {self._position()} contributions are folded before it"
            )
        except BaseException:
            staging.withdraw(request)
            raise

    # ---- a contribution ---------------------------------------------------------------------------

    def _announced(self, header: pb.Contribution) -> Contribution:
        """Return the contribution that this message announces. Raises a refusal if its fields are impossible."""
        model, policy, rank = self._model, self._run.policy, self._peer.rank
        if self._transport.reading is not None:
            raise refusal(Reason.BAD_REQUEST, "a Contribution before Taken, which frees the last reply's shared memory")
        kind = policy.kind
        if not kind.has_payload:
            if not header.completion.generation:
                raise refusal(Reason.BAD_REQUEST, f"rank {rank} sends a completion without its generation")
            kind = kind.received(header.payload.num_bytes > 0)
        contribution = read_contribution(header, self._seat, kind)
        if contribution.base.version > policy.version:
            problem = f"a contribution of rank {rank} on version {contribution.base.version}, which does not exist"
            raise refusal(Reason.BAD_REQUEST, f"{problem}: the newest is {policy.version}")
        # The server of others contributes when its own version is complete, which may have more steps than were asked
        # for, and none at its end.
        if not self._peer.num_workers and (wrong := policy.wrong_counts(rank, contribution.counts)):
            raise refusal(Reason.BAD_REQUEST, wrong)
        if (groups := contribution.training.hyperparameters) and not kind.worker_steps:  # else unchanged
            model.optimizer.check_changes(groups)
        if contribution.first is not None:
            self._peer.traffic.work = contribution.first.work
        if self._script_state.num_bytes:
            self._script_state.check_complete()
        without = contribution.payload.without_gradient
        self._without = model.names_here(without) if without else frozenset()
        self._peer.state = "uploading"
        return contribution

    async def _expected(self, header: pb.Begin | PayloadInfo) -> Upload:
        """Return the upload that a Begin or Contribution announces, or the current one if Begin preceded it."""
        store, codec = self._check(header)
        if (upload := self._upload) is not None:
            announced = codec, header.num_bytes, header.in_shared_memory
            if announced != (upload.codec, upload.num_bytes, upload.in_segment):
                message = "Begin and its Contribution differ in codec, num_bytes or in_shared_memory"
                raise refusal(Reason.BAD_REQUEST, message)
            return upload
        if header.in_shared_memory and self._transport.segment is not None:
            payload = self._transport.segment.payload[: store.layout.exchange_bytes]
        else:
            payload = await self._borrow()
        free_buffers = self._folding.free_buffers
        return Upload(self._model, self._tensors, codec, payload, free_buffers, header.in_shared_memory)

    def _continue(self, begin: pb.Begin) -> None:
        """Continue the upload of a lost stream. Its missing bytes arrive on this stream."""
        if self._upload is not None:
            raise refusal(Reason.BAD_REQUEST, "a Begin that continues another stream's upload, after a Begin")
        upload = self._upload = self._partials.take(self._peer.rank, begin.continues)
        # Its size depends on the tensors without gradient, which its Contribution names: `_check` compares them then.
        is_same = (begin.num_bytes, begin.codec or "raw") == (upload.num_bytes, upload.codec.name)
        can_follow = self._can_be_out_of_band(upload.codec) and self._transport.segment is None
        if not is_same or (begin.in_shared_memory and not can_follow):
            message = "a Begin continues an upload of another size or codec, or in another memory"
            raise refusal(Reason.BAD_REQUEST, message)
        upload.in_segment = begin.in_shared_memory
        upload.restart(upload.reader.ranges)
        self._stream.expect(upload.num_bytes - upload.reader.received)

    def _can_be_out_of_band(self, codec: Codec) -> bool:
        return codec.is_identity and not self._transport.as_frames

    def _check(self, header: pb.Begin | PayloadInfo) -> tuple[Store, Codec]:
        """Return the store and codec of an announced payload. Raises a refusal for a wrong size or transport."""
        store, codec, peer = self._model.store, codec_named(header.codec), self._peer
        if codec.name not in peer.codecs:
            error = unusable(self._run, peer, codec)
            peer.codecs[codec.name] = "" if error is None else error.message
        self._rejected = peer.codecs[codec.name]
        if self._run.policy.fragments > 1 and isinstance(codec, ByTensor):
            codec = only_rest(codec, self._without)
        num_bytes = store.layout.exchange_bytes if codec.is_identity else payload_bytes(codec, store.layout)
        if header.num_bytes != num_bytes:
            problem = f"a contribution of {header.num_bytes} bytes"
            raise refusal(Reason.BAD_REQUEST, f"{problem}; with codec '{codec.name}' this model needs {num_bytes}")
        if header.in_shared_memory and not self._can_be_out_of_band(codec):
            raise refusal(Reason.BAD_REQUEST, "a contribution in a segment that was not accepted, or not raw")
        peer.traffic.codec = codec.name
        return store, codec

    def _hand_over(
        self, contribution: Contribution, payload: Payload | None, judgement: Judgement, looked_s: float = 0.0
    ) -> None:
        """Stage a complete contribution, and offer it to the run."""
        peer, stream, traffic = self._peer, self._stream, self._peer.traffic
        traffic.num_sent += stream.bytes_read
        stream.bytes_read = 0
        traffic.num_peers += contribution.completion.peer_bytes
        rows, optimizer = self._rows, self._optimizer
        self._rows, self._optimizer = [], None
        if self._rejected and payload is not None:
            problem = f"a payload in a codec that was not agreed on ({self._rejected})"
            judgement = Judgement("reject", problem, "in every mode")
        elif rows:
            judgement = self._model.store.sanity.with_rows(judgement, [row.values for row in rows])
        base, script = contribution.base, self._script_state.take() if contribution.position is not None else None
        if payload is not None or script is not None:
            slot = None
            if payload is not None:  # the reserved memory is still unused if this is in the worker's shared memory
                slot, self._reserved = self._reserved, None
            self._folding.stage(contribution.id, Staged(payload, self._without, rows, optimizer, slot, script))
        peer.base, peer.reference = base.version if base.has_all else None, base.reference
        peer.state = "waiting"  # before the offer, because the run may reply at once
        bytes_so_far = traffic.num_sent, traffic.num_received
        self._offer(events.Contributed(contribution, judgement, looked_s, bytes_so_far))


def metrics_event(rank: int | None, message: pb.Metrics) -> events.MetricsReceived:
    """Return the event of an evaluation's metrics. `rank` is None for an evaluator."""
    finite = sorted((name[:_MAX_NAME], value) for name, value in message.metrics.items() if math.isfinite(value))
    exit_code = min(max(1, message.exit_code), 255)
    return events.MetricsReceived(
        rank, message.version, message.step, dict(finite[:_MAX_METRICS]), message.failure[:_MAX_FAILURE], exit_code
    )
