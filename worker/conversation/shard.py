"""One server process as a worker sees it: a connection, a part of the model, and the transport of its tensors.

If the server is one process, there is one shard, and its part is the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from ...common.config.schema import WorkerConfig
from ...common.errors import bad_request, shown
from ...common.registry import CODECS
from ...common.reporting.log import get_logger
from ...common.tensors.layout import DTYPES, as_bytes
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec, TableSpec
from ...common.tensors.sharding import Share
from ...common.wire.checks import check_header
from ...common.wire.frames import Frame, PayloadReader, message_frames
from ...common.wire.messages import read_reply, read_weights
from ...common.wire.records import COUNTED, Outcome, Reply, ResidualInfo, WeightsInfo, changed
from ...common.wire.segments import SegmentError
from ...proto import parameter_server_pb2 as pb
from ..session import Progress, Retry
from ..tensors.staged import make_transfer
from ..tensors.transfer import DirectTransfer, ModelTensors, part_of
from ..transports.transport import Down, Transports, Up, Write
from . import messages
from .channel import Channel, Lost, collect
from .messages import Begun, Final, Outgoing, Settings, Welcome
from .stream_client import StreamClient

if TYPE_CHECKING:
    from .tracing import ExchangeTraces

log = get_logger()

_LOG_WAITING_AFTER_S = 5.0
_MOST_SHOWN = 2_000  # longest sentence of a server that is logged, in characters


class Shard:
    """A worker's connection to one shard. Used by one thread at a time. Each message of the server resets `retry`."""

    share: Share
    model: ModelTensors  # this shard's part
    tables: tuple[TableSpec, ...]
    transfer: DirectTransfer
    up: Up
    down: Down
    _welcome: Welcome  # of the current stream

    def __init__(self, number: int, channel: Channel, config: WorkerConfig, progress: Progress, retry: Retry) -> None:
        self.number, self.channel = number, channel
        self.stream = StreamClient(channel)
        self.transports = Transports(config)
        self._config, self._progress, self._retry = config, progress, retry
        self._sent_hyperparameters: tuple[Hyperparameters, ...] | None = None
        self._sent_state: bytes | None = None  # sent with the newest contribution, while the server keeps it
        self.begun: Begun | None = None  # from the newest START

    # ---- joining ------------------------------------------------------------------------------

    def join(self, join: Any) -> Welcome:
        """Connect and join. Returns the server's Welcome. Raises Lost."""
        self.stream.open()
        self.stream.say(join=join)
        welcome = self.expect("welcome").of(Welcome)
        why_not = self.stream.go_direct(welcome) if self.transports.wants_direct else "not wanted"
        self.transports.joined(welcome, why_not)
        self._welcome = welcome
        self._sent_hyperparameters = self._sent_state = None
        return welcome

    def set_model(self, whole: ModelTensors, share: Share, optimizer: OptimizerSpec, settings: Settings) -> None:
        """Set this shard's part of the model, its rows of the tables, and the codecs."""
        codec = "raw" if settings.kind.has_peers else self._config.codec  # peers encode among themselves
        self._has_fragments = settings.fragments > 1  # payloads have one fragment of the parameters
        self.share, self.model = share, part_of(whole, share)
        self.tables = share.optimizer(optimizer).tables
        self.transfer = make_transfer(self.model)
        self.up = Up(CODECS.load(codec)(), self.model, self.transfer, self.stream.send)
        self.up.encoding.of_optimizer([group.hyperparameters for group in optimizer.groups])
        self.down = Down(CODECS.load(self._config.reply_codec)(), self.model, self.transfer)
        self._offered = messages.model_message(whole.layout, optimizer, codec, self._config.reply_codec)

    def moved(self, whole: ModelTensors) -> None:
        """The model has moved in memory. Gradients in shared memory stay there: it is used no more."""
        if self.transfer.has_lent:
            self.stream.hang_up()
        self.transfer.leave_segment()
        self.model = part_of(whole, self.share)
        self.transfer = self.up.transfer = self.down.transfer = make_transfer(self.model)

    def offer(self, kind: pb.RunSettings.ContributionKind, rendezvous: str) -> None:
        """Offer the model and negotiate the transport. `kind` is that of contributions, as in RunSettings."""
        model = pb.Model(contribution=kind, rendezvous=rendezvous)
        model.MergeFrom(self._offered)
        offered = self.transports.offer(model, self.model.layout.exchange_bytes)
        model.transport_reason = self.transports.reason
        self.stream.offer(model)
        if offered is not None:
            offered.decided(self.expect("shared_memory").of(pb.SharedMemory))
        self.transports.agreed()
        self.up.joined(self.transports.transport, self._welcome)

    def begin(self) -> Reply:
        """Receive the weights to start from. Uploads weights if the server requests them."""
        state = bytearray()
        while (received := self.expect("reply", "send_weights", "state")).kind != "reply":
            if received.kind == "send_weights":
                self._upload()
                continue
            piece = received.of(pb.State)
            if piece.offset != len(state):
                description = f"a piece of a State at {piece.offset} that does not follow {len(state)}"
                raise bad_request(f"the server sent {description}")
            state += piece.piece
        reply = self.take(received)
        position = reply.start.position if reply.start is not None else None
        self.begun = None if position is None else Begun(position, bytes(state))
        return reply

    def _upload(self) -> None:
        """Send the model's weights, as the server has asked for them."""
        num_bytes = self.model.layout.total_bytes
        header = pb.WorkerMessage(initial_weights=pb.InitialWeights(payload_bytes=num_bytes))
        self.stream.send(message_frames(header, self.transfer.gather_all(), num_bytes))

    # ---- exchanging ---------------------------------------------------------------------------

    def exchange(self, outgoing: Outgoing, traces: ExchangeTraces | None) -> Reply:
        """Send this shard's part of the contribution, and take the reply."""
        self._contribute(outgoing)
        if traces is not None:
            traces.sent()
        received = self.expect("reply")
        if traces is not None:
            traces.came()
        return self.take(received)

    def _contribute(self, outgoing: Outgoing) -> None:
        contribution, encoding = outgoing.contribution, self.up.encoding
        topics: dict[str, Any] = {}
        hyperparameters = contribution.training.hyperparameters
        if not encoding.is_raw or contribution.kind.holds_differences:
            hyperparameters = encoding.prepared(hyperparameters)
            without = self.model.names_at(contribution.payload.without_gradient)
            encoding.choose(without) if self._has_fragments else encoding.rest(without)
        if hyperparameters is self._sent_hyperparameters:
            hyperparameters = ()
        else:
            self._sent_hyperparameters = hyperparameters
        if hyperparameters is not contribution.training.hyperparameters:
            topics["training"] = changed(contribution.training, hyperparameters=hyperparameters)
        if self.number:  # only the coordinator stores the position
            topics["position"] = None
        elif outgoing.state is not None and outgoing.state != self._sent_state:
            self._sent_state = outgoing.state
            self.stream.send(messages.state_frames(outgoing.state))
        if outgoing.optimizer is not None:
            found = {
                f"{key}/{part.name}": (part.of(value) if value.dim() else value).contiguous()
                for part in self.share.parts
                for key, value in outgoing.optimizer.get(part.spec.name, {}).items()
            }
            self.stream.send(messages.state_frames(save(found), "optimizer"))
        if outgoing.rows:
            self.stream.send(messages.rows_frames(self.tables, outgoing.rows))
        if self.down.reference:
            topics["base"] = changed(contribution.base, reference=self.down.reference)
        try:
            self.up.contribute(contribution, **topics)
        except SegmentError as error:  # the next connection has another segment
            raise Lost(str(error)) from None

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors before their contribution."""
        try:
            self.up.depart(indices)
        except SegmentError:  # during backward: `step()` connects again
            self.stream.hang_up()

    def ask_again(self, seq: int) -> Reply:
        """Request the reply to this counted contribution again."""
        self.stream.say(ask_again={"seq": seq, "reference": self.down.reference})
        return self.take(self.expect("reply"))

    def take(self, received: Frame) -> Reply:
        """Read a reply that `expect` returned, and receive its weights. On return the model has them."""
        reply = read_reply(received.of(pb.Reply))
        outcome, encoding = reply.result.outcome, self.up.encoding
        if outcome not in COUNTED:
            self._sent_state = None
            self._progress.server_incarnation = 0  # the weights may overwrite what would be sent again
        if outcome not in COUNTED or not encoding.is_raw or encoding.residual is not None:
            self.up.replied(outcome)
        if not encoding.is_raw:
            encoding.ready(self._progress.version)
        if outcome is Outcome.START:
            self.down.reference = 0  # the server has lost its memory of earlier replies
        if reply.weights is not None:
            self._receive_weights(received, reply.weights)
        return reply

    def _receive_weights(self, received: Frame, weights: WeightsInfo) -> None:
        memory, down, num_bytes = None, self.down, weights.num_bytes
        # a small payload came with the reply
        if received.data and len(received.data) == num_bytes and not received.offset:
            down.take(weights, lambda write: write(0, received.data))
            return
        if weights.segment is not None:
            try:
                memory = self.transports.transport.memory(weights.segment)
            except SegmentError as error:
                raise Lost(f"the server's memory cannot be shared: {error}") from None
        if memory is not None and len(memory) < num_bytes:
            raise bad_request(f"the server sends {num_bytes} bytes of weights, in shared memory of {len(memory)}")
        is_in_place = memory is None and weights.codec in ("", "raw") and weights.reference is None
        is_out_of_band = memory is not None or (is_in_place and self.stream.direct is not None)
        kept: list[tuple[int, int]] = []  # bytes [start, end) that are not sent, because the model has them

        def leave(offset: int, num_bytes: int) -> None:
            start = kept.pop()[0] if kept and kept[-1][1] == offset else offset
            kept.append((start, offset + num_bytes))

        def receive(write: Write) -> None:
            def receive_out_of_band(offset: int, num_bytes: int) -> None:
                if memory is not None:
                    write(offset, memory[offset : offset + num_bytes])
                else:
                    self.stream.receive_into(self.transfer.targets(offset, num_bytes))

            reader = PayloadReader(num_bytes, write, receive_out_of_band if is_out_of_band else None, leave)
            collect(reader, received, self.stream.receive)

        down.take(weights, receive, kept)
        if memory is not None:
            self.stream.say(taken={})

    def expect(self, *kinds: str) -> Frame:
        """Receive the next frame of one of `kinds`.

        While only Waiting frames arrive, their reason is logged from time to time.
        """
        log_at = time.monotonic() + _LOG_WAITING_AFTER_S
        while True:
            received = self.stream.receive()
            if self._retry.num_failures and received.kind != "welcome":
                self._retry.reached()
            if received.header is not None:
                check_header(received.header)
            if received.kind in kinds:
                return received
            if received.kind != "waiting":
                raise bad_request(f"the server sent {received.kind}, expected {' or '.join(kinds)}")
            reason = received.of(pb.Waiting).reason
            if self.number == 0 and time.monotonic() >= log_at and reason:
                log.info("waiting", rank=self._progress.rank, reason=shown(reason, _MOST_SHOWN))
                log_at = time.monotonic() + 6 * _LOG_WAITING_AFTER_S

    def pull_rows(self, table: int, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Request this shard's rows among the distinct and ascending ids. The returned function waits for them."""
        spec, run, rank = self.tables[table], self._progress.run, self._progress.rank or 0
        first, end = torch.searchsorted(ids, torch.tensor([spec.first, spec.end], device="cpu")).tolist()
        parts = [bytes(as_bytes(ids[here])) for here in messages.chunks(first, end, spec.row_bytes)]
        requests = [pb.RowsRequest(run=run, rank=rank, table=table, ids=part) for part in parts]
        wait = self.channel.ask("PullRows", requests, pb.RowsReply)
        dtype, num_rows = DTYPES[spec.dtype], int(end - first)

        def rows() -> torch.Tensor:
            received = bytearray(b"".join(reply.rows for reply in wait()))
            if len(received) != num_rows * spec.row_bytes:
                raise bad_request(f"the server sends {len(received)} bytes for {num_rows} rows of table '{spec.name}'")
            flat = torch.frombuffer(received, dtype=dtype) if received else torch.empty(0, dtype=dtype, device="cpu")
            return flat.view(-1, spec.dim)

        return rows

    # ---- the end ------------------------------------------------------------------------------

    def finish(self, transfer_s: float, can_evaluate: bool, residual: ResidualInfo) -> Final:
        """Report that all steps are taken, upload the weights if the server asks for them, receive the final ones."""
        finish = {"transfer_s": transfer_s, "can_evaluate": can_evaluate, "residual": asdict(residual)}
        self.stream.say(finish=finish)
        while (received := self.expect("final", "send_weights")).kind == "send_weights":
            self._upload()
        final = received.of(Final)
        self._receive_weights(received, changed(read_weights(final.weights), codec=""))
        return final
