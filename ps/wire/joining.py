"""Lets a worker join: it waits for its turn, gets a rank, describes its model, and agrees on transport and codecs."""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache

import grpc.aio

from ...common.codecs.base import Codec
from ...common.combinations import Choices
from ...common.combinations import refusal as excluded
from ...common.config.schema import Config
from ...common.errors import ParamServerError, Reason, UsageError, refusal, shown
from ...common.registry import CODECS
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.version import PROGRAM_VERSION
from ...common.wire.checks import struct
from ...common.wire.protocol import layout_from_proto, optimizer_from_proto
from ...common.wire.segments import Segment, SegmentError, new_segment, open_segment
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..core.run import Run
from ..engine.engine import Engine
from ..engine.folding import Peer
from ..policies.base import Policy
from ..tensors.model import names_of
from .delivery import DirectTransport, SharedTransport, Transport
from .partial_transfers import PartialTransfers
from .port import Port
from .security import certificate_name, check_rank
from .stream import JoinQueue, Stream, StreamEnded

log = get_logger()

# A thread reads larger descriptions of a model, as they take about 10 us for each tensor.
_LARGE_MODEL_BYTES = 64 << 10
_MAX_REASON = 300  # characters
_MAX_CODECS = 32
_PROBE_BYTES = 4096


@cache
def codec_named(name: str) -> Codec:
    """Return the codec of this name, where "" is raw. Raises a BAD_REQUEST refusal for an unknown name."""
    try:
        codec: Codec = CODECS.load(name or "raw")()
        return codec
    except ParamServerError as error:
        raise refusal(Reason.BAD_REQUEST, error.message, fix=error.fix) from None


def unusable(run: Run, peer: Peer, codec: Codec) -> UsageError | None:
    """Return the error if the mode or the optimizer excludes a codec for this worker's contributions, else None."""
    assert peer.offer is not None
    policy, optimizer = run.policy, peer.offer[1]
    return excluded(
        Choices(
            mode=run.mode,
            kind=policy.kind,
            has_rounds=policy.has_rounds,
            codec=codec.name,
            reply_codec=peer.reply_codec.name if peer.reply_codec is not None else "raw",
            fragments=policy.fragments,
            optimizers=optimizer.each,
        )
    )


class Joining:
    """Lets workers join one run."""

    def __init__(self, engine: Engine, port: Port | None) -> None:
        self._engine, self._run, self._model = engine, engine.run, engine.model
        self._config = config = engine.config
        self._joins = JoinQueue(config.limits.joins_per_s, config.run.workers or config.limits.workers)
        self._probe: Segment | None = None  # a worker tries to open it, to find out whether it is on this host
        if config.server.shared_memory:
            with contextlib.suppress(SegmentError):
                self._probe = new_segment(_PROBE_BYTES)
        self._port = port
        self.partials = PartialTransfers(engine)
        self._has_warned = False

    async def seat(self, stream: Stream, context: grpc.aio.ServicerContext) -> Peer:
        """Give the process a rank, or find the rank that the coordinator gave it."""
        engine = self._engine
        join = (await stream.read_within(self._config.server.join_timeout_s, "join")).of(pb.Join)
        rank = check_rank(context, join.rank if join.rank >= 0 else None)
        if wait_s := self._joins.reserve():
            await stream.wait(asyncio.sleep(wait_s), lambda: "many workers join at once (limits.joins_per_s)")
        while engine.why_not_ready():  # workers join only once all shards are present
            await stream.wait(engine.until(lambda: not engine.why_not_ready()), engine.why_not_ready)
        peer = self._join(join, rank) if self._config.server.shard == 0 else await self._find(join, rank)
        peer.num_workers, peer.traffic.region = join.num_workers, join.region
        stream.rank, peer.hang_up = peer.rank, stream.end
        return peer

    def _join(self, join: pb.Join, rank: int | None) -> Peer:
        peer = self._engine.join(
            events.Joined(0, rank, join.run, join.incarnation, join.server_incarnation, join.process, join.num_workers)
        )
        log.routine(
            "joined", rank=peer.rank, incarnation=peer.incarnation, resumed=peer.is_resumed, host=join.host,
            pid=join.pid, device=join.device,
        )  # fmt: skip
        version = join.program_version
        if version not in ("", PROGRAM_VERSION):  # empty: another client of the protocol
            meaning = "worker and server ignore fields that the other version added: install the same version"
            log.warning("another_version", rank=peer.rank, worker=version, server=PROGRAM_VERSION, meaning=meaning)
        return peer

    async def _find(self, join: pb.Join, rank: int | None) -> Peer:
        """Return a worker's peer on another shard than the coordinator, which announces each worker to all shards."""
        server, run = self._config.server, self._run
        shard, lease_s = f"shard {server.shard}", run.options.lease_s
        if not join.seated or rank is None:
            problem = f"this is {shard} of {server.shards}: workers join the coordinator"
            raise refusal(Reason.SHARD_MISMATCH, problem, fix=f"ps-worker --server {server.coordinator}")
        if join.run != run.name:
            problem = f"the worker belongs to run {join.run}, {shard} to run {run.name}"
            fix = "every shard needs the coordinator of its own run (--coordinator)"
            raise refusal(Reason.RUN_MISMATCH, problem, fix=fix)
        if join.server_incarnation != run.incarnation or run.is_closed:
            raise refusal(Reason.NOT_READY, f"{shard} has not gone back to the snapshot yet, or is stopping")
        try:  # within a lease the coordinator sends a message again, or counts as lost
            return await self._engine.seated(rank, join.incarnation, min(lease_s, server.join_timeout_s))
        except TimeoutError:
            problem = f"the coordinator has not announced rank {rank}, incarnation {join.incarnation}, to {shard}"
            raise refusal(Reason.NOT_READY, f"{problem}, within a lease ({lease_s:g} s)") from None

    async def meet(self, stream: Stream, peer: Peer, context: grpc.aio.ServicerContext) -> Transport:
        """Send Welcome, and receive the worker's model. Returns the best transport that the worker offers.

        Raises StreamEnded if the worker leaves instead.
        """
        engine, run = self._engine, self._run
        transport = Transport(self._model, stream)
        ticket = self._port.offer(certificate_name(context)) if self._port is not None else None
        probe = self._probe.address if self._probe is not None else None
        welcome = pb.Welcome(
            run=run.name, rank=peer.rank, incarnation=peer.incarnation, seq=peer.number,
            settings=settings_of(self._config, run), probe=probe, server_incarnation=run.incarnation,
            resumed=peer.is_resumed, lease_s=self._config.server.lease_s, shards=engine.shard_addresses,
            takes_left_out=True, partial_transfer=await self.partials.offer(peer),
        )  # fmt: skip
        if self._port is not None and ticket is not None:
            welcome.direct.port, welcome.direct.ticket = self._port.number, ticket.secret
        try:
            await stream.say(pb.ServerMessage(welcome=welcome))
            # The server of others has the model when the first of them has come.
            limit_s = None if peer.num_workers else self._config.server.join_timeout_s
            second = await stream.read_within(limit_s, "model", "leave")
            if second.kind == "leave":
                engine.offer(events.Left(*peer.seat, "goodbye", "said goodbye"))
                raise StreamEnded
            offered = second.of(pb.Model)
            if offered.direct:
                if ticket is None or not ticket.arrived.done():
                    raise refusal(Reason.BAD_REQUEST, "Model.direct without a direct connection")
                stream.direct = ticket.arrived.result()
                ticket, transport = None, DirectTransport(self._model, stream)
        finally:
            if ticket is not None:
                ticket.drop()
        self._check_kind(offered)
        is_large = offered.ByteSize() > _LARGE_MODEL_BYTES
        layout, optimizer = await asyncio.to_thread(_read_model, offered) if is_large else _read_model(offered)
        why_no_better = shown(offered.transport_reason, _MAX_REASON)
        if offered.HasField("segment"):
            share = self._model.share_of(layout)
            transport, refused = await self._open_segment(transport, share.layout, offered.segment)
            why_no_better = refused or why_no_better
        self._model.check(peer.rank, layout, optimizer)
        peer.offer = (layout, optimizer)
        reply_codec = codec_named(offered.reply_codec)
        peer.reply_codec = None if reply_codec.is_identity else reply_codec
        if len(offered.codecs) > _MAX_CODECS:
            raise refusal(Reason.BAD_REQUEST, f"Model.codecs has {len(offered.codecs)} names; at most {_MAX_CODECS}")
        for name in offered.codecs or ("raw",):
            codec = codec_named(name)
            if (error := unusable(run, peer, codec)) is not None:
                raise refusal(Reason.BAD_REQUEST, f"rank {peer.rank}: {error.message}", fix=error.fix)
            peer.codecs[codec.name] = ""
            self._warn_of_momentum(codec)
        peer.takes_frames = transport.as_frames
        peer.traffic.transport, peer.traffic.transport_reason = transport.name, why_no_better
        peer.state = "computing" if peer.is_resumed else "waiting"
        engine.offer(events.Offered(*peer.seat, *names_of(layout, optimizer), offered.rendezvous[:_MAX_REASON]))
        return transport

    async def _open_segment(self, known: Transport, layout: Layout, offered: pb.Segment) -> tuple[Transport, str]:
        """Open the segment that a worker offers, and send it the result.

        Returns the shared transport and "", or `known` and the reason against shared memory.
        """
        transport, reason = known, ""
        try:
            if self._probe is None:
                raise SegmentError("the server shares no memory (server.shared_memory)")
            if offered.num_bytes < (needed := layout.exchange_bytes):
                raise SegmentError(f"the segment has {offered.num_bytes} bytes, and a contribution needs {needed}")
            transport = SharedTransport(known.model, known.stream, open_segment(offered))
        except SegmentError as error:
            reason = str(error)
            log.info("not_shared", rank=known.stream.rank, reason=reason)
        verdict = pb.SharedMemory(accepted=not reason, reason=reason)
        await known.stream.say(pb.ServerMessage(shared_memory=verdict))
        return transport, f"{SharedTransport.name}: {reason}" if reason else ""

    def _check_kind(self, offered: pb.Model) -> None:
        """Refuse a worker that cannot send this mode's contributions."""
        mode, kind, problem = self._config.run.mode, _kind_of(self._run.policy), ""
        if kind in _OF_DELTAS and kind != offered.contribution:
            name = pb.RunSettings.ContributionKind.Name(kind)
            problem = f"workers of mode {mode} send deltas (RunSettings.{name}), and this worker does not support them"
        elif self._run.policy.kind.has_peers and not offered.rendezvous:
            problem = f"mode {mode} averages among workers, and this worker sent no Model.rendezvous"
        if problem:
            raise refusal(Reason.BAD_REQUEST, problem, fix="install the same version of paramserver on both")

    def _warn_of_momentum(self, codec: Codec) -> None:
        """Warn once if the outer momentum does not suit this codec."""
        outer = self._run.policy.outer
        if outer is None or codec.suits_outer_momentum or not outer.arguments.get("momentum") or self._has_warned:
            return
        self._has_warned = True
        meaning = (
            f"{codec.name} sends few values of a difference at once, and outer momentum amplifies the late ones: "
            f"--set policy.outer_momentum=0, or --set worker.codec={codec.name} for ps-server too, which makes 0 the "
            "default"
        )
        log.warning("outer_momentum", codec=codec.name, momentum=outer.arguments["momentum"], meaning=meaning)


_OF_DELTAS = (pb.RunSettings.DELTA, pb.RunSettings.DELTA_OF_FRAGMENT, pb.RunSettings.DELTA_OVERLAPPED)


def _kind_of(policy: Policy) -> pb.RunSettings.ContributionKind:
    if policy.kind.holds_differences and policy.common.delayed_update:
        return pb.RunSettings.DELTA_OVERLAPPED
    if policy.fragments > 1:
        return pb.RunSettings.DELTA_OF_FRAGMENT
    kind: pb.RunSettings.ContributionKind = getattr(pb.RunSettings, policy.kind.name)
    return kind


def settings_of(config: Config, run: Run) -> pb.RunSettings:
    """Return the settings of the run for its workers."""
    policy, settings, task = run.policy, config.run, config.task
    optimizer = pb.Optimizer(name=config.optimizer.name)
    optimizer.groups.add(hyperparameters=struct(config.optimizer.arguments()))
    return pb.RunSettings(
        mode=run.mode, contribution=_kind_of(policy), num_workers=settings.workers or 0, steps=settings.steps or 0,
        epochs=settings.epochs or 0, eval_every=settings.eval_every or "", ends_by_metrics=settings.ends_by_metrics,
        batch_size=settings.batch_size, seed=settings.seed, pull_every=policy.pull_every,
        fragments=policy.fragments if policy.fragments > 1 else 0, overlap_steps=policy.overlap_steps,
        outstanding=policy.num_in_flight, union_batch=policy.has_rounds and policy.kind.steps_along_mean_gradient,
        task=task.name if ".py:" not in task.name else "", task_args=struct(task.args), optimizer=optimizer,
        polyak=config.store.polyak or 0.0, delayed_update=config.policy.delayed_update,
        train=struct(config.train.model_dump(exclude_defaults=True)), in_region=config.upstream.server is not None,
    )  # fmt: skip


def _read_model(message: pb.Model) -> tuple[Layout, OptimizerSpec]:
    """Return the layout and optimizer of a Model message."""
    layout = layout_from_proto(message.tensors)
    if message.fingerprint != layout.fingerprint:
        raise refusal(Reason.BAD_REQUEST, "Model.fingerprint does not belong to Model.tensors")
    return layout, optimizer_from_proto(message.optimizer, layout)
