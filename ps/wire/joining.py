"""A worker's way in: who it is, when its turn comes, which rank it gets, and what it trains."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import grpc.aio

from ...common.codecs.base import Codec
from ...common.config.schema import Config
from ...common.errors import Reason, refusal, shown
from ...common.reporting.log import get_logger
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ...common.version import PROGRAM_VERSION
from ...common.wire.protocol import layout_from_proto, optimizer_from_proto, struct
from ...proto import parameter_server_pb2 as pb
from ..core import events
from ..core.run import Run
from ..engine.engine import Engine
from ..engine.peers import Peer
from ..policies.base import Policy
from ..tensors.model import names_of
from .intake import barred, codec_named
from .limits import Joins
from .port import Port
from .security import certificate_name, check_rank
from .stream import Stream
from .transports.direct import DirectTransport
from .transports.grpc import Transport
from .transports.shared import Probe

log = get_logger()

# A larger description of a model is read beside the event loop: about 10 us for each of its tensors.
_LARGE_MODEL_BYTES = 64 << 10
_ENDED_S = 1.0  # within which the old stream of a process that is back is over
_MAX_REASON = 300  # characters
_MAX_CODECS = 32


class Joining:
    """Takes workers into one run."""

    def __init__(self, engine: Engine, config: Config, port: Port | None) -> None:
        self._engine = engine
        self._config = config
        self._joins = Joins(config.limits.joins_per_s, config.run.workers or config.limits.workers)
        self._probe = Probe(config.server.shared_memory)
        self._port = port
        self._has_warned = False

    async def seat(self, stream: Stream, context: grpc.aio.ServicerContext) -> Peer | None:
        """Give the process a rank, or find the one that the coordinator has given it; None when it has gone."""
        engine = self._engine
        first = await stream.read_within(self._config.server.join_timeout_s, "join")
        if first is None:
            return None
        join = first.of(pb.Join)
        rank = check_rank(context, join.rank if join.rank >= 0 else None)
        if wait_s := self._joins.turn():
            await stream.wait(asyncio.sleep(wait_s), lambda: "many workers join at once (limits.joins_per_s)")
        while engine.why_not_ready():  # nobody joins before all shards are there
            await stream.wait(engine.until(lambda: not engine.why_not_ready()), engine.why_not_ready)
        peer = self._join(join, rank) if self._config.server.shard == 0 else await self._find(join, rank)
        stream.rank, peer.hang_up = peer.rank, stream.end
        if peer.is_resumed:
            engine.tensors.submit(partial(engine.folding.codec_memories.of(peer.rank).resumed, join.replies_taken))
        return peer

    def _join(self, join: pb.Join, rank: int | None) -> Peer:
        peer = self._engine.join(
            events.Joined(0, rank, join.run, join.incarnation, join.server_incarnation, join.process)
        )
        log.routine(
            "joined", rank=peer.rank, incarnation=peer.incarnation, resumed=peer.is_resumed, host=join.host,
            pid=join.pid, device=join.device,
        )  # fmt: skip
        if join.program_version not in ("", PROGRAM_VERSION):  # empty: a program of somebody else's
            meaning = "what only one of them knows is ignored by the other: install the same version"
            log.warning(
                "another_version", rank=peer.rank, worker=join.program_version, server=PROGRAM_VERSION, meaning=meaning
            )
        return peer

    async def _find(self, join: pb.Join, rank: int | None) -> Peer:
        """On a shard other than the coordinator, which has put it on its way here before it told the worker."""
        server, run = self._config.server, self._engine.run
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
        lease_s = run.options.lease_s  # after which the coordinator is heard again, or lost
        try:
            return await self._engine.seated(rank, join.incarnation, min(lease_s, server.join_timeout_s))
        except TimeoutError:
            raise refusal(
                Reason.NOT_READY,
                f"the coordinator has not told shard {server.shard} of rank {rank}, incarnation {join.incarnation}, "
                f"within a lease ({lease_s:g} s)",
            ) from None

    async def _held(self, peer: Peer) -> pb.Held | None:
        """What is here of the contribution that the process sent when its stream was lost."""
        if not peer.is_resumed:
            return None
        engine, number, halves = self._engine, peer.number + 1, self._engine.folding.halves
        with suppress(TimeoutError):  # an older stream of it may not have ended yet
            await engine.until(
                lambda: all(seat == peer.seat or seat[0] != peer.rank for seat in engine.peers), _ENDED_S
            )
        if (half := halves.of(peer.rank, number)) is None:
            return None
        ranges, crc = half.ranges, await engine.tensors.run(half.check_sum)
        if halves.of(peer.rank, number) is not half:
            return None
        held = pb.Held(step=number, payload_bytes=half.num_bytes, codec=half.codec.name, crc=crc)
        held.ranges.extend(border for found in ranges for border in found)
        return held

    async def meet(
        self, stream: Stream, peer: Peer, transport: Transport, context: grpc.aio.ServicerContext
    ) -> Transport | None:
        """Say who it is, and hear what it trains. The transport of its payloads, which is another than `transport`
        where it has
        offered one; None when it has gone instead."""
        engine, run = self._engine, self._engine.run
        ticket = self._port.offer(certificate_name(context)) if self._port is not None else None
        welcome = pb.Welcome(
            run=run.name,
            rank=peer.rank,
            incarnation=peer.incarnation,
            step=peer.number,
            settings=settings_of(self._config, run),
            probe=self._probe.shown,
            server_incarnation=run.incarnation,
            resumed=peer.is_resumed,
            lease_s=self._config.server.lease_s,
            shards=engine.shard_addresses,
            takes_left_out=True,
            held=await self._held(peer),
        )
        if self._port is not None and ticket is not None:
            welcome.direct.port, welcome.direct.ticket = self._port.number, ticket.secret
        try:
            await stream.say(pb.ServerMessage(welcome=welcome))
            second = await stream.read_within(self._config.server.join_timeout_s, "model", "leave")
            if second is not None and second.kind == "model" and second.of(pb.Model).direct:
                if ticket is None or not ticket.arrived.done():
                    raise refusal(Reason.BAD_REQUEST, "Model.direct without a direct connection")
                stream.go_direct(ticket.arrived.result())
                ticket, transport = None, DirectTransport(transport.engine, stream)
        finally:
            if ticket is not None:
                ticket.drop()
        if second is None:
            return None
        if second.kind == "leave":
            engine.offer(events.Left(*peer.seat, "goodbye", "said goodbye"))
            return None
        offered = second.of(pb.Model)
        kind = _kind_of(engine.run.policy)
        if kind in _OF_DELTAS and kind != offered.contribution:
            told = pb.RunSettings.ContributionKind.Name(kind)
            sends = f"deltas (RunSettings.{told}), which this worker does not say that it sends"
            fix = "install the same version of paramserver on both"
            raise refusal(Reason.BAD_REQUEST, f"workers of mode {self._config.run.mode} send {sends}", fix=fix)
        if engine.run.policy.kind.has_peers and not offered.rendezvous:
            problem = f"mode {self._config.run.mode} averages among workers, and this worker sent no Model.rendezvous"
            raise refusal(Reason.BAD_REQUEST, problem, fix="install the same version of paramserver on both")
        layout, optimizer = await _read_model(offered)
        why_no_better = shown(offered.transport_reason, _MAX_REASON)
        if offered.HasField("segment"):
            share = engine.model.share_of(layout)
            transport, refused = await self._probe.open(transport, share.layout, offered.segment)
            why_no_better = refused or why_no_better
        engine.model.check(peer.rank, layout, optimizer)
        peer.offer = (layout, optimizer)
        self._agree(peer, offered)
        peer.takes_frames = transport.as_frames
        peer.traffic.transport, peer.traffic.transport_reason = transport.name, why_no_better
        peer.state = "computing" if peer.is_resumed else "waiting"
        engine.offer(events.Offered(*peer.seat, *names_of(layout, optimizer), offered.rendezvous[:_MAX_REASON]))
        return transport

    def _agree(self, peer: Peer, offered: pb.Model) -> None:
        """On the codecs of its contributions and replies; refuses such as the run cannot have."""
        engine, down = self._engine, codec_named(offered.reply_codec)
        peer.reply_codec = None if down.is_identity else down
        if peer.reply_codec is not None and engine.run.policy.compensation is not None:
            raise refusal(
                Reason.BAD_REQUEST,
                f"worker.reply_codec is {down.name}, and policy.late_compensation needs weights as workers have them",
                fix="--set worker.reply_codec=raw, or --set policy.late_compensation=none",
            )
        if len(offered.codecs) > _MAX_CODECS:
            raise refusal(Reason.BAD_REQUEST, f"Model.codecs has {len(offered.codecs)} names; at most {_MAX_CODECS}")
        for name in offered.codecs or ("raw",):
            if (error := barred(engine, peer, up := codec_named(name))) is not None:
                raise refusal(Reason.BAD_REQUEST, f"rank {peer.rank}: {error.message}", fix=error.fix)
            peer.codecs[up.name] = ""
            self._warn(up)

    def _warn(self, up: Codec) -> None:
        """Once, of what the run can have and is better without."""
        outer = self._engine.run.policy.outer
        if outer is None or up.suits_outer_momentum or not outer.arguments.get("momentum") or self._has_warned:
            return
        self._has_warned = True
        meaning = (
            f"{up.name} sends few values of a difference, and the others long after, which outer momentum adds up: "
            f"--set policy.outer_momentum=0, or --set worker.codec={up.name} for ps-server too, whose default is 0 then"
        )
        log.warning("outer_momentum", codec=up.name, momentum=outer.arguments["momentum"], meaning=meaning)


_OF_DELTAS = (pb.RunSettings.DELTA, pb.RunSettings.DELTA_OF_FRAGMENT, pb.RunSettings.DELTA_OVERLAPPED)


def _kind_of(policy: Policy) -> pb.RunSettings.ContributionKind:
    if policy.kind.holds_differences and policy.common.delayed_update:
        return pb.RunSettings.DELTA_OVERLAPPED
    if policy.fragments > 1:
        return pb.RunSettings.DELTA_OF_FRAGMENT
    kind: pb.RunSettings.ContributionKind = getattr(pb.RunSettings, policy.kind.name)
    return kind


def settings_of(config: Config, run: Run) -> pb.RunSettings:
    """What every worker is told of the run."""
    policy = run.policy
    return pb.RunSettings(
        mode=run.mode,
        contribution=_kind_of(policy),
        num_workers=config.run.workers or 0,
        steps=config.run.steps or 0,
        epochs=config.run.epochs or 0,
        eval_every=config.run.eval_every or "",
        ends_by_metrics=config.run.ends_by_metrics,
        batch_size=config.run.batch_size,
        seed=config.run.seed,
        pull_every=policy.pull_every,
        fragments=policy.fragments if policy.fragments > 1 else 0,
        overlap_steps=policy.merge.after_steps,
        outstanding=policy.outstanding,
        union_batch=policy.has_rounds and policy.kind.steps_along_mean_gradient,
        merge=policy.merge.rule,
        merge_alpha=policy.merge.alpha,
        task=config.task.name if ".py:" not in config.task.name else "",
        task_args=struct(config.task.args),
        optimizer=pb.Optimizer(
            name=config.optimizer.name,
            groups=[pb.ParameterGroup(hyperparameters=struct(config.optimizer.arguments()))],
        ),
        polyak=config.store.polyak or 0.0,
        delayed_update=config.policy.delayed_update,
        train=struct(config.train.model_dump(exclude_defaults=True)),
    )


async def _read_model(message: pb.Model) -> tuple[Layout, OptimizerSpec]:
    """What a worker trains; nobody waits while one of very many tensors is read."""

    def read() -> tuple[Layout, OptimizerSpec]:
        layout = layout_from_proto(message.tensors)
        if message.fingerprint != layout.fingerprint:
            raise refusal(Reason.BAD_REQUEST, "Model.fingerprint does not belong to Model.tensors")
        return layout, optimizer_from_proto(message.optimizer, layout)

    is_large = message.ByteSize() > _LARGE_MODEL_BYTES
    return await asyncio.to_thread(read) if is_large else read()
