"""The server's shards as a worker sees them. Each request goes to all shards, about their parts of the model.

The first shard is the coordinator, which knows the worker. A server of one process is a set of one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...common.config.schema import WorkerConfig
from ...common.errors import UnreachableError, bad_request, shown
from ...common.registry import CODECS
from ...common.reporting.log import get_logger
from ...common.security import Credentials
from ...common.tensors.layout import DTYPES, as_bytes
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec, TableSpec
from ...common.tensors.sharding import Share, divide
from ...common.wire.checks import check_header
from ...common.wire.frames import Frame, PayloadReader, message_frames
from ...common.wire.messages import read_reply, read_weights
from ...common.wire.records import COUNTED, Outcome, Reply, ResidualInfo, WeightsInfo, changed
from ...common.wire.segments import SegmentError
from ...proto import parameter_server_pb2 as pb
from ..session import Progress, Retry
from ..tensors.staged import make_transfer
from ..tensors.transfer import DirectTransfer, ModelTensors, part_of
from ..transports.encoding import Encoding
from ..transports.limit import Limit
from ..transports.transport import Down, Transports, Up, Write
from . import messages
from .channel import Channel, Lost, collect
from .messages import Begun, Final, Outgoing, Settings, Welcome
from .stream_client import StreamClient
from .threads import END_S, Helper, wait_for

if TYPE_CHECKING:
    from .tracing import ExchangeTraces


# ---- shard ----------------------------------------------------------------------------------------------

# One server process as a worker sees it: a connection, a part of the model, and the transport of its tensors.
#
# If the server is one process, there is one shard, and its part is the whole model.

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
        hyperparameters = contribution.training.hyperparameters
        if not encoding.is_raw or contribution.kind.holds_differences:
            hyperparameters = encoding.prepared(hyperparameters)
            without = self.model.names_at(contribution.payload.without_gradient)
            encoding.choose(without) if self._has_fragments else encoding.rest(without)
        if hyperparameters is self._sent_hyperparameters:
            hyperparameters = ()
        else:
            self._sent_hyperparameters = hyperparameters
        if self.number:  # only the coordinator stores the position
            contribution = changed(contribution, position=None)
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
            contribution = changed(contribution, base=changed(contribution.base, reference=self.down.reference))
        try:
            self.up.contribute(contribution, hyperparameters)
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

    def finish(self, transfer_s: float, stays: bool, residual: ResidualInfo) -> Final:
        """Report that all steps are taken, upload the weights if the server asks for them, receive the final ones."""
        finish = {"transfer_s": transfer_s, "stays": stays, "residual": asdict(residual)}
        self.stream.say(finish=finish)
        while (received := self.expect("final", "send_weights")).kind == "send_weights":
            self._upload()
        final = received.of(Final)
        self._receive_weights(received, changed(read_weights(final.weights), codec=""))
        return final


# ---- shard set ------------------------------------------------------------------------------------------


log = get_logger()

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

_MAX_KEYS, _MORE_BYTES = 8, 1 << 20  # limits of an optimizer's state: multiples of the parameters, and bytes for names


class ShardSet:
    """The shards; `all` has one per server process."""

    settings: Settings  # of the run
    optimizer: OptimizerSpec

    def __init__(self, config: WorkerConfig, credentials: Credentials, progress: Progress, retry: Retry) -> None:
        """Each message of a shard resets `retry`."""
        self._config, self._credentials, self._progress, self._retry = config, credentials, progress, retry
        self._limit = Limit(config.max_mbit)
        self.first = self._make(0, config.server)
        self.all = [self.first]
        self._addresses: list[str] = []
        self._helpers: list[Helper] = []  # threads for the shards after the first
        self._model: ModelTensors | None = None
        self.peers_encoding: Encoding | None = None  # of gradients between peers
        self._num_lost, self._norm_lost = 0, 0.0  # lost residuals, and the sum of their norms

    def _make(self, number: int, address: str) -> Shard:
        channel = Channel(address, self._credentials, self._limit)
        return Shard(number, channel, self._config, self._progress, self._retry)

    @property
    def transport(self) -> str:
        """Names of the transports in use, for people."""
        return ", ".join(dict.fromkeys(shard.transports.transport.name for shard in self.all))

    def connect(self, addresses: list[str]) -> None:
        """Use the shards at these addresses, which may have changed.

        The coordinator's own address is empty. The list is empty if the server is one process.
        """
        if addresses == self._addresses:
            return
        if self._model is not None:  # a START follows
            for shard in self.all:
                shard.up.encoding.start()
            self.count_lost()
        for old in self.all[1:]:
            old.stream.close()
        self._addresses = addresses
        self.all[1:] = [self._make(number, address) for number, address in enumerate(addresses) if number]
        if self._model is not None:
            self.divide(self._model, self.optimizer)

    def divide(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Give each shard its part of the model."""
        for shard, share in zip(self.all, divide(model.layout, len(self.all)), strict=True):
            shard.set_model(model, share, optimizer, self.settings)
        self._model, self.optimizer = model, optimizer  # a model that cannot be divided is none of the shards'

    def moved(self) -> None:
        """The model has moved in memory."""
        assert self._model is not None
        for shard in self.all:
            shard.moved(self._model)

    # ---- the same for each shard --------------------------------------------------------------

    def each(
        self, work: Callable[Concatenate[Shard, Arguments], Result], *given: Arguments.args, **named: Arguments.kwargs
    ) -> list[Result]:
        """Run `work` for all shards in parallel, with these arguments. Returns the results in order.

        If it fails for one shard, the streams of the others are closed, because they cannot complete. A refusal is
        raised rather than the losses that follow from it.
        """
        shards = self.all
        if len(shards) == 1:
            return [work(shards[0], *given, **named)]

        def guarded(shard: Shard) -> Result | Exception:
            try:
                return work(shard, *given, **named)
            except Exception as error:
                _hang_up(shards)
                return self.lost(shard, error) if isinstance(error, Lost) else error

        while len(self._helpers) < len(shards) - 1:
            self._helpers.append(Helper(f"shard {len(self._helpers) + 1}"))
        others = [
            helper.submit(partial(guarded, shard)) for helper, shard in zip(self._helpers, shards[1:], strict=False)
        ]
        try:
            first = guarded(shards[0])
            for future in others:
                wait_for(future)
        except BaseException:  # interrupted: the worker will say goodbye to the first shard
            _hang_up(shards[1:])
            wait(others, END_S)
            raise
        results = [first, *(future.result() for future in others)]
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise next((error for error in failures if not isinstance(error, Lost)), failures[0])
        return [result for result in results if not isinstance(result, Exception)]

    @staticmethod
    def lost(shard: Shard, lost: Lost) -> Lost:
        return Lost(f"shard {shard.number} at {shard.channel.address}: {lost}")

    # ---- residuals of the contributions: of each shard's part, or of the gradients between peers ---

    @property
    def _encodings(self) -> list[Encoding]:
        return [shard.up.encoding for shard in self.all] if self.peers_encoding is None else [self.peers_encoding]

    def residual(self) -> ResidualInfo:
        """The norm of all residuals, and the number and norms of lost ones."""
        norm = math.hypot(*(encoding.norm for encoding in self._encodings))
        return ResidualInfo(norm, self._num_lost, self._norm_lost)

    def count_lost(self) -> None:
        """Count residuals that were lost since the last call. Losses on several shards count once."""
        found = [lost for encoding in self._encodings if (lost := encoding.take_lost()) is not None]
        if found:
            norm, codec = math.hypot(*found), self._encodings[0].codec.name
            self._num_lost, self._norm_lost = self._num_lost + 1, self._norm_lost + norm
            log.info("residual_lost", rank=self._progress.rank, codec=codec, norm=f"{norm:.4g}", num=self._num_lost)

    # ---- gradients ahead of their contribution ------------------------------------------------

    def prepare(self, indices: list[int]) -> bool:
        """Start copying these gradients off their device. Returns False if they are on the host."""
        have_begun = [shard.up.prepare(here) for shard, here in self._lying_on(indices)]
        return any(have_begun)

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors before their contribution."""
        for shard, here in self._lying_on(indices):
            shard.depart(here)

    def recall(self) -> None:
        """Discard the gradients that were sent early."""
        for shard in self.all:
            shard.up.recall()

    def _lying_on(self, indices: list[int]) -> list[tuple[Shard, list[int]]]:
        """Each shard that has parts of these tensors, with the parts' indices."""
        return [(shard, here) for shard in self.all if (here := shard.model.indices_of(indices))]

    # ---- calls beside the stream --------------------------------------------------------------

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a table, [n, dim], for distinct and ascending ids. Raises Lost."""
        pending = [shard.pull_rows(table, ids) for shard in self.all]
        return torch.cat([rows() for rows in pending])

    def find_again(self, run: str) -> None:
        """Connect to shards that have moved, if the coordinator can be reached for their addresses."""
        if len(self.all) > 1:
            with suppress(Lost):
                for shard, address in zip(self.all, self.first.channel.shard_addresses(run), strict=False):
                    if shard.number and address != shard.channel.address:
                        shard.channel.move(address)

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """Fetch the state of the server's optimizer, by parameter and key (exp_avg, step). Raises UnreachableError."""
        found: dict[str, dict[str, list[torch.Tensor]]] = {}
        for shard in self.all:
            share = shard.share
            try:
                state = load(shard.channel.pull_optimizer(_MAX_KEYS * share.layout.parameter_bytes + _MORE_BYTES))
            except Lost as lost:
                message = f"the optimizer's state could not be fetched from {shard.channel.address}: {lost}"
                raise UnreachableError(message, fix="try again when the server is back") from None
            except SafetensorError as error:
                raise bad_request(f"the server sends an invalid optimizer state: {error}") from None
            names = {part.name: part.spec.name for part in share.parts}
            shapes = {spec.name: spec.shape for spec in share.layout.specs}
            for full, tensor in state.items():
                key, _, name = full.partition("/")
                if name not in names or (tensor.dim() and tuple(tensor.shape) != shapes[name]):
                    description = f"an optimizer's state '{shown(full)}' {list(tensor.shape)}"
                    raise bad_request(f"the server sends {description}, which this model does not have")
                found.setdefault(names[name], {}).setdefault(key, []).append(tensor)
        return {
            name: {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in state.items()}
            for name, state in found.items()
        }

    def close(self) -> None:
        for shard in self.all:
            shard.stream.close()
        for helper in self._helpers:
            helper.end()
        if self._model is not None:
            for shard in self.all:
                shard.transfer.leave_segment()


def _hang_up(shards: list[Shard]) -> None:
    for shard in shards:
        shard.stream.hang_up()
