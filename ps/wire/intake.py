"""Contributions come in: from frames of one worker's stream to events of the run.

A small one comes whole in the message that announces it; a large one in pieces, which may begin to come
before the facts that belong to it (`upload.py`).
"""

from __future__ import annotations

import asyncio
import functools
import math
from dataclasses import asdict
from functools import partial

from ...common.codecs.base import Codec, check_codecs, payload_bytes
from ...common.codecs.shared.by_tensor import ByTensor, only_rest
from ...common.errors import CheckpointError, ParamServerError, Reason, UsageError, refusal
from ...common.registry import CODECS
from ...common.reporting.log import get_logger
from ...common.tensors.layout import copy_of
from ...common.wire.checks import check_header
from ...common.wire.frames import Frame, parse
from ...common.wire.messages import read_contribution
from ...common.wire.records import Contribution, PayloadInfo
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..core.judgement import SOUND, Judgement
from ..engine.engine import Engine
from ..engine.peers import Peer
from ..snapshots.store_state import read_optimizer
from ..tensors.flat_optimizer import OptimizerState
from ..tensors.staging import Payload
from ..tensors.store import Store
from ..tensors.tables import Rows
from ..tensors.upload import Upload, decode
from .stream import Stream, StreamLost
from .transports.grpc import Transport

log = get_logger()

_LEAST_KEPT = 16 << 20  # of a payload: a smaller one is sent again whole
_MAX_NAME, _MAX_SAID = 100, 500  # letters
_MAX_KEYS, _MORE_BYTES = 8, 1 << 20  # of an optimizer's state: times the parameters, and names
_MAX_METRICS = 64  # of an evaluation
# What a worker may send before the facts of its contribution, and after them.
_NEXT = (
    "contribution",
    "ask_again",
    "begin",
    "rows",
    "finish",
    "leave",
    "stop",
    "metrics",
    "taken",
    "state",
    "optimizer",
    "",
)
_PIECE = ("taken", "")


class Intake:
    """Takes one worker's contributions into the run."""

    def __init__(self, engine: Engine, stream: Stream, peer: Peer, transport: Transport) -> None:
        self._engine = engine
        self._stream = stream
        self._peer = peer
        self._transport = transport
        self._without: frozenset[str] = frozenset()  # a gradient, in it
        self._barred = ""  # why it cannot be in the codec that it is in
        self._state: tuple[int, bytearray] = (0, bytearray())  # of its script: size, and what has come of it
        self._rows: list[Rows] = []  # of it
        self._optimizer: tuple[int, bytearray] = (0, bytearray())  # as `_state`
        self._brought: OptimizerState | None = None
        self._slot: Payload | None = (
            None  # of the staging pool: rows or an optimizer's state have come ahead of the payload
        )
        self._halves = engine.folding.halves
        self._position = partial(engine.run.policy.upload_position, peer.rank)

    async def next(self) -> Frame | None:
        """Take one contribution and hand it to the run. Returns the Contribution, or the AskAgain, Finish or Leave
        that came instead; None when the stream ended before it was whole."""
        upload: Upload | None = None
        facts: Frame | None = None
        announced: Contribution | None = None
        is_lost = True
        try:
            while facts is None or upload is None or not upload.is_complete:
                received = await self._stream.read(*(_NEXT if facts is None else _PIECE))
                if received is None or received.kind in ("finish", "leave"):
                    return received
                if received.kind == "taken":
                    self._transport.taken()
                    continue
                if received.kind == "stop":
                    self._engine.offer(events.StopAsked(*self._peer.seat, received.of(pb.Stop).reason))
                    continue
                if received.kind == "state":
                    self._take_state(received.of(pb.State))
                    continue
                if received.kind == "optimizer":
                    await self._take_optimizer(received.of(pb.State), upload)
                    continue
                if received.kind == "rows":
                    await self._take_rows(received, upload)
                    continue
                if received.kind == "metrics":
                    self._engine.offer(metrics_received(self._peer.rank, received.of(pb.EvaluationMetrics)))
                    continue
                if received.kind == "ask_again":
                    self._take_question(received.of(pb.AskAgain))
                    return received
                if received.kind == "contribution":
                    facts, announced = received, self._facts(received.of(pb.Contribution))
                    if not announced.kind.has_payload:
                        self._hand_over(announced, None, SOUND)
                        return facts
                    if announced.payload.continues:
                        upload = self._continued(announced, upload)
                    elif upload is None and len(facts.data) == announced.payload.num_bytes:
                        await self._take_whole(announced, facts)
                        return facts
                    else:
                        upload = await self._announced(announced.payload, upload)
                elif received.kind == "begin":
                    upload = await self._announced(received.of(pb.Begin), upload)
                    upload.restart()
                if upload is None:
                    raise refusal(Reason.BAD_REQUEST, "a piece of a payload that no Begin or Contribution announced")
                if received.placed and upload.in_segment:
                    await self._transport.fetch(upload.target[received.offset :][: received.placed])
                upload.feed(received)
            whole_at = self._engine.now()
            judgement = await upload.judge()
            looked_s = self._engine.now() - whole_at
            assert announced is not None
            self._hand_over(announced, upload.take(), judgement, looked_s)
            return facts
        except Exception as error:
            is_lost = isinstance(error, StreamLost)
            raise
        finally:
            if upload is not None and not (is_lost and announced is not None and self._keep_half(announced, upload)):
                upload.close()
            if (slot := self._taken_slot()) is not None:
                self._engine.model.staging.give_back(slot)

    def _take_question(self, ask_again: pb.AskAgain) -> None:
        self._peer.state, self._peer.base = "waiting", None
        self._peer.reference = ask_again.reference
        self._engine.offer(events.AskedAgain(*self._peer.seat, ask_again.seq))

    def _keep_half(self, contribution: Contribution, upload: Upload) -> bool:
        """Whether what has come of a payload is kept for the next stream of this process."""
        rank, staging = self._peer.rank, self._engine.model.staging
        is_here = self._engine.may_return(self._peer)
        is_worth_it = upload.num_bytes > _LEAST_KEPT and upload.ranges and not upload.is_complete
        # Memory of a segment is the worker's; what others wait for is theirs.
        if not (is_here and is_worth_it and staging.is_own(upload.payload)) or staging.num_waiting:
            return False
        self._halves.keep(rank, contribution.id.seq, upload)
        return True

    def _continued(self, contribution: Contribution, begun: Upload | None) -> Upload:
        """What is here of the payload of this contribution; the rest comes."""
        payload, seq = contribution.payload, contribution.id.seq
        _, codec = self._check(payload)
        if begun is not None:
            raise refusal(Reason.BAD_REQUEST, "a Contribution that continues another stream's, after a Begin")
        upload = self._halves.of(self._peer.rank, seq)
        if upload is None:  # no refusal: with that it would cease to be a member
            log.info("not_continued", rank=self._peer.rank, step=seq, meaning="the memory is used: it joins again")
            raise StreamLost
        if upload.codec != codec or (payload.in_shared_memory and self._transport.memory(0) is not None):
            raise refusal(Reason.BAD_REQUEST, "a Contribution continues one in another codec, or in another memory")
        upload = self._halves.take(self._peer.rank)
        upload.go_on(payload.in_shared_memory)
        self._stream.owe(upload.num_missing)
        return upload

    def _take_state(self, piece: pb.State) -> None:
        limit = self._engine.config.limits.state_bytes
        if piece.num_bytes > limit:
            raise refusal(
                Reason.LIMIT_EXCEEDED,
                f"what the script of rank {self._peer.rank} remembers (session.state) is {piece.num_bytes:,} bytes; "
                f"this server takes {limit:,} (limits.state_bytes)",
                fix="give session.state() less, or start ps-server with --set limits.state_bytes=...",
            )
        self._state = _joined(self._state, piece)

    async def _take_optimizer(self, piece: pb.State, upload: Upload | None) -> None:
        model, rank = self._engine.model, self._peer.rank
        if (
            not model.has_weights
            or model.layout is None
            or piece.num_bytes > _MAX_KEYS * model.layout.parameter_bytes + _MORE_BYTES
        ):
            raise refusal(Reason.BAD_REQUEST, f"rank {rank}: {piece.num_bytes:,} bytes of an optimizer of this model")
        await self._reserve(upload)
        self._optimizer = num_bytes, come = _joined(self._optimizer, piece)
        if len(come) == num_bytes:
            self._optimizer = (0, bytearray())
            try:
                self._brought = await self._engine.tensors.run(partial(read_optimizer, model, bytes(come)))
            except CheckpointError as error:
                raise refusal(
                    Reason.BAD_REQUEST, f"what the optimizer of rank {rank} remembers: {error.message}"
                ) from None

    def _told_state(self) -> bytes | None:
        """All of what came before the contribution."""
        (num_bytes, come), self._state = self._state, (0, bytearray())
        if len(come) < num_bytes:
            raise refusal(Reason.BAD_REQUEST, f"a Contribution after {len(come)} of {num_bytes} bytes of a State")
        return bytes(come) if come else None

    async def _take_rows(self, received: Frame, upload: Upload | None) -> None:
        header, model = received.of(pb.Rows), self._engine.model
        if not model.has_weights or model.store.tables is None:
            raise refusal(Reason.BAD_REQUEST, "rows of a run that has no tables yet, or none at all")
        await self._reserve(upload)
        self._rows.append(model.store.tables.read(header.table, header.count, received.data, self._rows))

    async def _reserve(self, upload: Upload | None) -> None:
        """Memory for the payload of the contribution to come, before anything of it is kept: whatever is staged for a
        contribution counts as one upload of `server.max_staged`. What is here of a payload has that memory already."""
        if upload is None and self._slot is None and not self._halves.has(self._peer.rank):
            self._slot = await self._borrow()

    def _taken_slot(self) -> Payload | None:
        slot, self._slot = self._slot, None
        return slot

    async def _take_whole(self, contribution: Contribution, received: Frame) -> None:
        """A small contribution, whose payload came with it."""
        store, codec = self._check(contribution.payload)
        payload = await self._borrow()
        if codec.is_identity:
            self._take_raw(contribution, received, store, payload)
            return
        try:
            memory, encoded = self._engine.folding.codec_memories.of(self._peer.rank), copy_of(received.data)
            judgement = await self._engine.tensors.run(partial(decode, store, memory, codec, encoded, payload))
        except BaseException:
            self._engine.tensors.then(partial(self._engine.model.staging.give_back, payload))
            raise
        self._hand_over(contribution, payload, judgement)

    def _take_raw(self, contribution: Contribution, received: Frame, store: Store, payload: Payload) -> None:
        staging = self._engine.model.staging
        try:
            staging.bytes_of(payload)[:] = received.data
            judgement = store.sanity.examine(payload, store.weights)
        except BaseException:
            self._engine.tensors.then(partial(staging.give_back, payload))
            raise
        self._hand_over(contribution, payload, judgement)

    def take_small(self, raw: bytes) -> bool:
        """The same between two calls of `next`, at once; False for what is no raw contribution in one message, or has
        to wait."""
        received = parse(pb.WorkerMessage, raw)
        header = received.header
        if not isinstance(header, pb.Contribution) or len(received.data) != header.payload.num_bytes:
            return False
        check_header(header)
        contribution = self._facts(header)
        if not contribution.kind.has_payload:
            self._stream.num_received += len(raw)
            self._hand_over(contribution, None, SOUND)
            return True
        store, codec = self._check(contribution.payload)
        payload = self._engine.model.staging.try_borrow(self._position) if codec.is_identity else None
        if payload is None:
            return False
        self._stream.num_received += len(raw)
        self._take_raw(contribution, received, store, payload)
        return True

    def _facts(self, header: pb.Contribution) -> Contribution:
        """The contribution that this message announces; refuses what it cannot be."""
        model, policy = self._engine.model, self._engine.run.policy
        if self._transport.reading is not None:
            raise refusal(Reason.BAD_REQUEST, "a Contribution before Taken: the last reply's segment is still lent")
        if not model.has_weights:
            raise refusal(Reason.NOT_JOINED, f"rank {self._peer.rank} has no weights to compute on yet")
        kind = policy.kind
        if not (kind.has_payload or header.completion.generation):
            message = f"rank {self._peer.rank} sends a completion, and does not say of which generation"
            raise refusal(Reason.BAD_REQUEST, message)
        contribution = read_contribution(header, self._peer.seat, kind.received(header.payload.num_bytes > 0))
        if contribution.base.version > (version := policy.version):
            what = f"a contribution of rank {self._peer.rank} on version {contribution.base.version}"
            raise refusal(Reason.BAD_REQUEST, f"{what}, which nobody was given: the newest is {version}")
        model.check_hyperparameters(contribution.training.hyperparameters)
        self._without = model.names_here(contribution.payload.without_gradient)
        self._peer.state = "uploading"
        return contribution

    async def _announced(self, header: pb.Begin | PayloadInfo, upload: Upload | None) -> Upload:
        """The upload that a Begin or a Contribution announces, or that a Contribution belongs to."""
        store, codec = self._check(header)
        if upload is not None:
            if (upload.codec, upload.in_segment) != (codec, header.in_shared_memory):
                raise refusal(Reason.BAD_REQUEST, "Begin and its Contribution differ in codec or in_shared_memory")
            return upload
        payload = self._transport.memory(store.layout.exchange_bytes) if header.in_shared_memory else None
        if payload is None:
            payload = await self._borrow()
        memory, give_back = (
            self._engine.folding.codec_memories.of(self._peer.rank),
            self._engine.model.staging.give_back,
        )
        return Upload(store, self._engine.tensors, codec, payload, give_back, memory, header.in_shared_memory)

    def _check(self, header: pb.Begin | PayloadInfo) -> tuple[Store, Codec]:
        """The store and the codec of a payload that is announced well."""
        if not self._engine.model.has_weights:
            raise refusal(Reason.NOT_JOINED, f"rank {self._peer.rank} has no weights to compute on yet")
        store = self._engine.model.store
        codec = codec_named(header.codec)
        if (why := self._peer.codecs.get(codec.name)) is None:
            error = barred(self._engine, self._peer, codec)
            why = self._peer.codecs[codec.name] = "" if error is None else error.message
        self._barred = why
        if self._engine.run.policy.fragments > 1 and isinstance(codec, ByTensor):
            codec = only_rest(codec, self._without)
        num_bytes = payload_bytes(codec, store.layout)
        if header.num_bytes != num_bytes:
            raise refusal(
                Reason.BAD_REQUEST,
                f"a contribution of {header.num_bytes} bytes; with codec '{codec.name}' this model's have {num_bytes}",
            )
        if header.in_shared_memory and not self._transport.carries(codec):
            raise refusal(Reason.BAD_REQUEST, "a contribution in a segment that was not accepted, or not raw")
        self._peer.traffic.codec = codec.name
        return store, codec

    def _hand_over(
        self, contribution: Contribution, payload: Payload | None, judgement: Judgement, looked_s: float = 0.0
    ) -> None:
        """A whole contribution: let the run have it."""
        if self._barred:
            what = f"a payload in a codec that was not agreed on ({self._barred})"
            judgement = Judgement("reject", what, "in every mode")
        traffic, stream = self._peer.traffic, self._stream
        traffic.num_sent, stream.num_received = traffic.num_sent + stream.num_received, 0
        traffic.num_peers += contribution.completion.peer_bytes
        rows, self._rows = self._rows, []
        brought, self._brought = self._brought, None
        try:
            event = self._event(contribution, judgement, rows, looked_s)
        except BaseException:
            if payload is not None:
                self._engine.tensors.then(partial(self._engine.model.staging.give_back, payload))
            raise
        base = contribution.base
        self._peer.base = base.version if base.has_all else None
        self._peer.reference = base.reference
        slot = self._taken_slot() if payload is not None else None  # the payload lies in the worker's own memory
        self._peer.state = "waiting"  # before the run has it: it may reply at once
        self._engine.contributed(event, payload, self._without, rows, brought, slot)

    def _event(
        self, contribution: Contribution, judgement: Judgement, rows: list[Rows], looked_s: float
    ) -> events.Contributed:
        """What the run is told of it; what its script remembers is staged."""
        if rows:
            judgement = self._engine.model.store.sanity.with_rows(judgement, [row.values for row in rows])
        traffic = self._peer.traffic
        if (position := contribution.position) is not None:
            said = {name: value for name, value in asdict(position).items() if value is not None}
            self._engine.states.stage(contribution.id, said, self._told_state())
        bytes_so_far = traffic.num_sent, traffic.num_received - traffic.num_in_waiting
        return events.Contributed(contribution, judgement, looked_s, bytes_so_far)

    async def _borrow(self) -> Payload:
        """Memory for the upload; while there is none its bytes wait at the sender, who is told why."""
        staging, position = self._engine.model.staging, self._position
        if (slot := self._taken_slot()) is not None:
            return slot
        self._halves.drop(self._peer.rank)
        payload = staging.try_borrow(position)
        if payload is not None:
            return payload
        self._halves.drop_all()
        borrowing = asyncio.ensure_future(staging.borrow(position))
        try:
            return await self._stream.wait(
                borrowing, lambda: f"memory for the upload; {position()} contributions are folded before it"
            )
        except BaseException:
            if not borrowing.cancel() and not borrowing.cancelled():
                staging.give_back(borrowing.result())  # it came in the moment the call was cancelled
            raise


def _joined(held: tuple[int, bytearray], piece: pb.State) -> tuple[int, bytearray]:
    """With another piece of it."""
    num_bytes, come = held if piece.offset else (piece.num_bytes, bytearray())
    if piece.num_bytes != num_bytes or piece.offset != len(come) or len(come) + len(piece.piece) > num_bytes:
        raise refusal(Reason.BAD_REQUEST, f"a piece of a State at {piece.offset} that does not follow {len(come)}")
    come += piece.piece
    return num_bytes, come


def metrics_received(rank: int | None, said: pb.EvaluationMetrics) -> events.MetricsReceived:
    """The event; `rank` None: of a process that does not train."""
    sound = sorted((name[:_MAX_NAME], value) for name, value in said.metrics.items() if math.isfinite(value))
    metrics = dict(sound[:_MAX_METRICS])
    exit_code = min(max(1, said.exit_code), 255)
    return events.MetricsReceived(rank, said.version, said.step, metrics, said.failure[:_MAX_SAID], exit_code)


def barred(engine: Engine, peer: Peer, up: Codec) -> UsageError | None:
    """Why contributions of this worker cannot come in a codec: its mode or optimizer cannot have it; None: they can."""
    assert peer.offer is not None
    policy, optimizer = engine.run.policy, peer.offer[1]
    groups = zip(optimizer.classes, (group.hyperparameters for group in optimizer.groups), strict=True)
    down = peer.reply_codec or codec_named("")
    try:
        check_codecs(engine.run.mode, policy.kind, up, down, list(groups), fragments=policy.fragments)
    except UsageError as error:
        return error
    return None


@functools.cache
def codec_named(name: str) -> Codec:
    """One of this program's codecs; empty is raw. Refuses BAD_REQUEST a name it does not know."""
    try:
        codec: Codec = CODECS.load(name or "raw")()
        return codec
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None
