"""The worker's side of the conversation: join, offer the model, contribute, finish; rejoin when lost.

With a server of several shards the same is said to all of them, to each about its part. The first, the
coordinator, is the one that knows the worker; when any connection is lost, all are closed and made again.
The pure session makes every decision, `shard.py` has what concerns one connection.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...common.config.schema import WorkerConfig
from ...common.errors import Reason, UnreachableError, refusal, same_batches, shown
from ...common.registry import AUTO, CODECS
from ...common.reporting.history import History
from ...common.reporting.log import get_logger
from ...common.security import PLAINTEXT, Credentials
from ...common.tensors.optimizers import OptimizerSpec
from ...common.tensors.sharding import Share, divide
from ...common.wire.records import COUNTED, ContributionId, GroupInfo, Outcome, Reply, ResidualInfo, Timing
from ..session import Progress, Retry
from ..tensors.parts import part_of
from ..tensors.transfer import ModelTensors
from ..transports.auto.measuring import Auto, Passed, round_trip_s
from ..transports.choice import Transports
from ..transports.limit import Limit
from .client import Client, Lost, wait_for_server
from .heartbeat import Heartbeat
from .interrupts import sleep
from .messages import (
    Begun,
    Final,
    Goodbye,
    HeartbeatReply,
    Outgoing,
    Settings,
    Welcome,
    heartbeat_bytes,
    join_message,
    read_settings,
)
from .pool import Pool
from .shard import Shard

if TYPE_CHECKING:
    from .tracing import ExchangeTraces

log = get_logger()

_ATTEMPT_S = 2.0  # one attempt to connect
_MAX_KEYS, _MORE_BYTES = 8, 1 << 20  # of an optimizer's state: times the parameters, and names


class Exchange:
    """One worker's membership in a run. Blocking; raises the errors of `common/errors.py`."""

    def __init__(
        self, config: WorkerConfig, rank: int | None, history: str | None = None, credentials: Credentials = PLAINTEXT
    ) -> None:
        self._config = config
        self._traces: ExchangeTraces | None = None
        self._credentials = credentials
        self._retry = Retry(config.server, config.give_up_s, rank)
        self._limit = Limit(config.max_mbit)
        self.auto = Auto(config.reply_codec, config.max_mbit) if config.codec == AUTO else None
        self.progress = Progress(rank=rank, process=secrets.token_hex(8))
        self._join_message = partial(join_message, self.progress, socket.gethostname(), os.getpid(), config.device)
        self._shards = [self._shard(0, config.server)]
        self._addresses: list[str] = []
        self._pool = Pool()
        self._heartbeat = Heartbeat(config.server, credentials, self._heartbeat_replied)
        self._history = History(history)
        self._model: ModelTensors | None = None
        self._optimizer: OptimizerSpec | None = None
        self._last_transfer_s = 0.0
        self._num_lost, self._norm_lost = 0, 0.0  # of what the codec had kept back
        self._passed: list[Passed] = []  # with the newest contribution
        self.measured: list[dict[str, Any]] = []  # the fields of EvaluationMetrics, that may not have been heard
        self.rendezvous = ""  # where members of a group may meet, of workers that average among themselves
        self.group = GroupInfo()  # with whom, from here on;
        # By the newest heartbeat reply: whose membership it is about, server incarnation, newest generation that is
        # over.
        self._over = 0, 0, 0.0
        self.stop_reason = ""  # why this worker wants the run to end for all
        self._welcome: Welcome = self._join()  # the last one
        self.settings: Settings = read_settings(self._welcome.settings)

    def trace(self, url: str | None) -> None:
        """Send spans of every exchange there, from now on. UsageError without the extra."""
        if url is not None:
            from .tracing import ExchangeTraces

            self._traces = ExchangeTraces(url, self.progress.rank)

    @property
    def server(self) -> str:
        return self._config.server

    @property
    def is_encrypted(self) -> bool:
        """What goes to and from the server is in TLS."""
        return self._credentials.ca is not None

    @property
    def trusts_network(self) -> bool:
        """What has no TLS may leave this machine."""
        return self._credentials.trusts_network

    @property
    def told_settings(self) -> bytes:
        """As the server said them."""
        return self._welcome.settings.SerializeToString()

    @property
    def lease_s(self) -> float:
        """Who is not heard of for so long is let go."""
        return self._welcome.lease_s

    @property
    def zero(self) -> int:
        """What workers that average among themselves divide."""
        return self._config.zero

    @property
    def zero_copies(self) -> int:
        return self._config.zero_copies

    def _shard(self, number: int, address: str) -> Shard:
        client = Client(address, self._credentials, self._limit)
        return Shard(number, client, self._config, self.progress, self._reply_comes, self._retry.reached)

    # ---- joining ----------------------------------------------------------------------------

    def _join(self) -> Welcome:
        """Connect and be welcomed, as often as it takes within the give-up time."""
        while True:
            try:
                welcome = self._shards[0].join(self._join_message(), _ATTEMPT_S)
                break
            except Lost as lost:
                wait_for_server(self._retry, lost)
        if self.progress.rank not in (None, welcome.rank):
            what = f"the server made rank {self.progress.rank} rank {welcome.rank}"
            raise refusal(Reason.BAD_REQUEST, what, fix="install the same version of paramserver on both")
        self.progress.welcomed(welcome.run, welcome.rank, welcome.incarnation)
        self.progress.total_steps = welcome.settings.steps or self.progress.total_steps
        self.progress.pull_every = max(1, welcome.settings.pull_every)
        self._retry.rank = welcome.rank
        self._heartbeat.start(heartbeat_bytes(self.progress), welcome.lease_s)
        if list(welcome.shards) != self._addresses:
            self._meet(list(welcome.shards))
        return welcome

    def _heartbeat_replied(self, membership: int, heartbeat_reply: HeartbeatReply) -> None:
        self._over = (
            membership,
            heartbeat_reply.server_incarnation,
            math.inf if heartbeat_reply.is_gone else heartbeat_reply.over_generation,
        )

    def is_over(self, generation: int) -> bool:
        """The server has let a member of this generation go, or this worker itself."""
        membership, incarnation, over = self._over
        is_ours = (membership, incarnation) == (self._heartbeat.membership, self._welcome.server_incarnation)
        return is_ours and generation <= over

    def _meet(self, addresses: list[str]) -> None:
        """The other shards, where there are any; they may have moved. Theirs by number, the coordinator's own is
        empty; none at all where there is one server."""
        if self._model is not None:  # a START follows
            for shard in self._shards:
                shard.up.encoding.start()
            self._count_lost()
        for old in self._shards[1:]:
            old.client.close()
        self._addresses = addresses
        self._shards[1:] = [self._shard(number, address) for number, address in enumerate(addresses) if number]
        if self._model is not None:
            self._divide()

    def _divide(self) -> None:
        assert self._model is not None and self._optimizer is not None
        self._shares: list[Share] = divide(self._model.layout, len(self._shards))
        for shard, share in zip(self._shards, self._shares, strict=True):
            shard.hold(part_of(self._model, share), share.optimizer(self._optimizer).tables)
            shard.has_fragments = self.settings.fragments > 1
        self._use_codec()

    def _use_codec(self) -> None:
        """From the next contribution on, the one that was chosen."""
        for shard in self._shards:
            if self.auto is not None and shard.up.encoding.codec.name != self.auto.codec:
                shard.up.encoding.use(CODECS.load(self.auto.codec)())

    def moved(self) -> None:
        """The model lies elsewhere in memory now."""
        assert self._model is not None
        for shard, share in zip(self._shards, self._shares, strict=True):
            shard.moved(part_of(self._model, share))

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        """Offer the model and receive the weights to start from."""
        self._model, self._optimizer = model, optimizer
        self._divide()
        if {self._config.codec, self._config.reply_codec} != {"raw"}:
            meaning = "contributions go up and weights come down so; the server's own weights and moments are as ever"
            log.info("codecs", up=self._config.codec, down=self._config.reply_codec, meaning=meaning)
        try:
            self._offer()
            self._begin()
            if self.auto is not None:
                self.auto.meet(model.layout, round_trip_s(self._shards[0].client.status), self.settings.delayed_update)
        except Lost as lost:
            self._return(lost)

    def _offer(self) -> None:
        """Say what this worker trains, to all shards, and agree on the transports."""
        assert self._model is not None and self._optimizer is not None
        codecs = (self._config.codec,) if self.auto is None else self.auto.candidates
        kind = self._welcome.settings.contribution
        for shard in self._shards:
            if shard.number:
                try:
                    shard.join(self._join_message(self._welcome), _ATTEMPT_S)
                except Lost as lost:
                    raise Lost(f"shard {shard.number} at {shard.client.address}: {lost}") from None
            shard.offer(self._model.layout, self._optimizer, kind, codecs, self.rendezvous)
        log.routine("tensors", transport=self.transport, reason=self._shards[0].transports.reason)
        if self.auto is not None:
            self.auto.joined(
                all(shard.transports.transport.carries_codecs for shard in self._shards),
                all(shard.is_here for shard in self._shards),
            )

    def _begin(self) -> Reply:
        reply = self._took(self._pool.all(self._shards, Shard.begin))
        self.progress.started(reply)
        self._history.write(
            "start",
            run=self.progress.run,
            **self._who,
            server_incarnation=self._welcome.server_incarnation,
            step=self.progress.num_counted,
            version=self.progress.version,
        )
        return reply

    @property
    def begun(self) -> Begun | None:
        """Where this rank's last contribution that counts began, if the server told it with the newest START."""
        return self._shards[0].begun

    def _return(self, lost: Lost) -> Reply | None:
        """After a lost connection: the reply that says where to start again. None when this worker is still a member
        (the welcome counts what `progress` does or one contribution more): then nothing is to be started."""
        for shard in self._shards:
            shard.transfer.leave_segment()
        while True:
            for shard in self._shards:
                shard.client.close_stream()
            log.warning("connection_lost", reason=str(lost), step=self.progress.num_counted)
            sleep(self._retry.failed(time.monotonic(), str(lost)))
            self._welcome = self._join()
            try:
                self._offer()
                reply = None if self._welcome.resumed else self._begin()
            except Lost as again:
                lost = again
                continue
            log.info("resumed" if reply is None else "rejoined", **self._who, step=self._welcome.step)
            return reply

    def use_transports(self, names: tuple[str, ...]) -> None:
        """Come back over the first of these transports that both sides can open: as after a lost connection."""
        config = self._config.model_copy(update={"transports": names})
        for shard in self._shards:
            shard.transports = Transports(config)
        self._return(Lost(f"other transports are wanted: {', '.join(names)}"))

    @property
    def _holds_back(self) -> bool:
        """The next contribution is to leave in one piece."""
        if self.auto is None:
            return False
        return self.auto.measures or (
            self.auto.codec == "raw" and any(shard.up.encoding.owes for shard in self._shards)
        )

    @property
    def _who(self) -> dict[str, int | None]:
        return {"rank": self.progress.rank, "incarnation": self.progress.incarnation}

    @property
    def transport(self) -> str:
        """How tensors travel, for people."""
        return ", ".join(dict.fromkeys(shard.transports.transport.name for shard in self._shards))

    @property
    def _residual(self) -> ResidualInfo:
        """What the codec keeps back, of all parts, and what of such was lost."""
        norm = math.hypot(*(shard.up.encoding.norm for shard in self._shards))
        return ResidualInfo(norm, self._num_lost, self._norm_lost)

    def _count_lost(self) -> None:
        """What was kept back is gone, of one part or of all: that is once."""
        found = [lost for shard in self._shards if (lost := shard.up.encoding.take_lost()) is not None]
        if not found:
            return
        norm, codec = math.hypot(*found), self._shards[0].up.encoding.codec.name
        self._num_lost, self._norm_lost = self._num_lost + 1, self._norm_lost + norm
        log.info("residual_lost", rank=self.progress.rank, codec=codec, norm=f"{norm:.4g}", num=self._num_lost)

    # ---- exchanging -------------------------------------------------------------------------

    def contribute(self, outgoing: Outgoing) -> Reply:
        """Send the next contribution; returns when the run lets the worker go on, with its weights in the model."""
        started = time.perf_counter()
        compute_s = outgoing.contribution.timing.compute_s
        outgoing = outgoing.changed(timing=Timing(compute_s, self._last_transfer_s), residual=self._residual)
        local_steps, self._passed = self.progress.local_steps, []
        name = self.progress.run, self.progress.rank or 0, self.progress.incarnation or 0, self.progress.next_number
        try:
            reply = self._exchange(outgoing)
        except Lost as lost:
            reply, self._passed = self._contribute_again(lost, outgoing), []
        if self.auto is not None and reply.result.outcome in COUNTED:
            self.auto.counted(self._passed, compute_s, local_steps, self.progress.training_steps)
            self._use_codec()
        if self._traces is not None:
            self._traces.end(*name, reply.result.gate_wait_s, reply.result.outcome.name)
        elapsed_s = time.perf_counter() - started
        self._last_transfer_s = max(0.0, elapsed_s - reply.result.gate_wait_s)
        return reply

    def _exchange(self, outgoing: Outgoing) -> Reply:
        outgoing = self._numbered(outgoing)

        def exchange(shard: Shard) -> Reply:
            began = time.perf_counter()
            shard.contribute(self._part_of(outgoing, shard))
            if self._traces is not None:
                self._traces.sent()
            received = shard.receive()
            if self._traces is not None:
                self._traces.came()
            if self.auto is None:
                return shard.take(received)
            came = time.perf_counter()
            reply = shard.take(received)
            down_s = time.perf_counter() - came
            up_s, here = came - began - reply.result.gate_wait_s, len(received.data or b"")
            num_bytes = reply.weights.num_bytes if reply.weights is not None else 0
            self._passed.append(Passed(shard.up.num_bytes, up_s, here, num_bytes - here, down_s))
            return reply

        if self._traces is not None:
            self._traces.begin()
        self._say_first()
        number, base_version = self.progress.next_number, self.progress.version
        self._history.write("send", **self._who, step=number, base_version=base_version)
        return self._took(self._pool.all(self._shards, exchange))

    def _numbered(self, outgoing: Outgoing) -> Outgoing:
        """The contribution as the next one of this worker, with what only its place in the run says."""
        contribution, progress = outgoing.contribution, self.progress
        seat = progress.rank or 0, progress.incarnation
        topics: dict[str, Any] = {"id": ContributionId(*seat, progress.next_number)}
        topics["base"] = replace(contribution.base, version=progress.version)
        if progress.is_cut_short and contribution.counts.num_training_steps is None:
            topics["counts"] = replace(contribution.counts, num_training_steps=progress.local_steps)
        if contribution.completion.generation or not (progress.wants_weights or contribution.training.evaluates):
            topics["training"] = replace(contribution.training, wants_weights=False)
        return outgoing.changed(**topics)

    def _part_of(self, outgoing: Outgoing, shard: Shard) -> Outgoing:
        if outgoing.optimizer is None:
            return outgoing
        parts = self._shares[shard.number].parts
        found = {
            f"{key}/{part.name}": (part.of(value) if value.dim() else value).contiguous()
            for part in parts
            for key, value in outgoing.optimizer.get(part.spec.name, {}).items()
        }
        return outgoing._replace(optimizer=found)

    def _contribute_again(self, lost: Lost, outgoing: Outgoing) -> Reply:
        """The same contribution on new connections, until it gets its reply or the run has gone on without it."""
        while True:
            reply = self._return(lost)
            if reply is not None:
                return reply
            try:
                if self._welcome.step <= self.progress.num_counted:
                    return self._exchange(outgoing)
                return self._ask_again()
            except Lost as again:
                lost = again

    def _ask_again(self) -> Reply:
        """For the reply to the last contribution that counts."""

        def ask(shard: Shard) -> Reply:
            shard.ask_again(self._welcome.step)
            return shard.take(shard.receive())

        return self._took(self._pool.all(self._shards, ask))

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table, [n, dim], of distinct and ascending ids. Waits for a server that is lost up to the give-up
        time: what is computed on rows of one that has gone back comes to nothing, as the next contribution tells."""
        retry = Retry(self._config.server, self._config.give_up_s, self.progress.rank)
        while True:
            try:
                asked = [shard.pull_rows(table, ids) for shard in self._shards]
                return torch.cat([rows() for rows in asked])
            except Lost as lost:
                sleep(retry.failed(time.monotonic(), str(lost)))
                with suppress(Lost):  # a shard that was lost may have come back elsewhere
                    for shard, address in zip(self._shards, self._shard_addresses(), strict=False):
                        if shard.number and address != shard.client.address:
                            shard.client.move(address)

    def _shard_addresses(self) -> list[str]:
        return self._shards[0].client.shard_addresses(self.progress.run) if len(self._shards) > 1 else []

    def prepare(self, indices: list[int]) -> bool:
        """Begin to copy these gradients off their device, if they are on one; True when that has begun."""
        have_begun = [shard.up.prepare(here) for shard, here in self._lying_on(indices)]
        return any(have_begun)

    def depart(self, indices: list[int]) -> None:
        """Send the gradients of these tensors ahead of the contribution they belong to; not while that is measured."""
        if self._holds_back:
            return
        for shard, here in self._lying_on(indices):
            shard.up.depart(here)

    def recall(self) -> None:
        """What has departed is not what is to be contributed."""
        for shard in self._shards:
            shard.up.recall()

    def _lying_on(self, indices: list[int]) -> list[tuple[Shard, list[int]]]:
        """Of these tensors of the model, the parts on each shard that has some."""
        return [(shard, here) for shard in self._shards if (here := shard.model.indices_of(indices))]

    def _reply_comes(self, reply: Reply) -> None:
        """From any shard, before its weights are written."""
        if reply.result.outcome not in COUNTED:  # what is to be sent again may lie under these weights
            self.progress.server_incarnation = 0

    def _took(self, replies: list[Reply]) -> Reply:
        """All shards have replied and the weights are in the model, all parts of one version."""
        self._count_lost()
        reply = replies[0]
        self.progress.server_incarnation = self._welcome.server_incarnation
        result = reply.result
        self.progress.replied(reply)
        self.group = reply.group or GroupInfo()
        self.measured.clear()
        if result.outcome is not Outcome.START:  # that one is noted as a start, with whose server's it is
            self._history.write(
                "replied",
                **self._who,
                step=result.seq,
                version=result.version,
                outcome=result.outcome.name,
            )
        if (other := reply.next_work.same_batches_as) is not None:
            log.warning("same_batches", **same_batches(other, self.progress.rank or 0))
        if result.outcome is Outcome.REJECTED:
            reason = shown(result.reason, 2_000)
            log.warning("rejected", rank=self.progress.rank, step=self.progress.next_number, reason=reason)
        return reply

    # ---- the end ----------------------------------------------------------------------------

    def finish(self, can_evaluate: bool) -> Final | None:
        """No more steps are taken: wait for the others, receive the final weights. None when all were taken and there
        are some to take again, because the server was lost and has gone back to a snapshot."""
        is_early = not self.progress.is_done
        while True:
            try:
                self._say_first()
                finish = methodcaller("finish", self._last_transfer_s, can_evaluate, self._residual)
                finals = self._pool.all(self._shards, finish)
            except Lost as lost:
                if self._return(lost) is not None and not (is_early or self.progress.is_done):
                    return None
                continue
            self.progress.version = finals[0].version
            self._history.write("end", rank=self.progress.rank, step=self.progress.num_counted)
            return finals[0]

    def pull_averaged(self, model: ModelTensors) -> None:
        """Write the Polyak average into another instance of the model."""
        for shard, share in zip(self._shards, self._shares, strict=True):
            shard.pull_averaged(part_of(model, share))

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """What the server's optimizer remembers, by parameter and key (exp_avg, step). UnreachableError."""
        found: dict[str, dict[str, list[torch.Tensor]]] = {}
        for shard, share in zip(self._shards, self._shares, strict=True):
            try:
                held = load(shard.client.pull_optimizer(_MAX_KEYS * share.layout.parameter_bytes + _MORE_BYTES))
            except Lost as lost:
                message = f"the optimizer's state cannot be had from {shard.client.address}: {lost}"
                raise UnreachableError(message, fix="try again when the server is back") from None
            except SafetensorError as error:
                raise refusal(Reason.BAD_REQUEST, f"the server sends no state of an optimizer: {error}") from None
            of_part = {part.name: part.spec.name for part in share.parts}
            shapes = {spec.name: spec.shape for spec in share.layout.specs}
            for full, tensor in held.items():
                key, _, name = full.partition("/")
                if name not in of_part or (tensor.dim() and tuple(tensor.shape) != shapes[name]):
                    what = f"an optimizer's state '{shown(full)}' {list(tensor.shape)}"
                    raise refusal(Reason.BAD_REQUEST, f"the server sends {what}, which this model does not have")
                found.setdefault(of_part[name], {}).setdefault(key, []).append(tensor)
        return {
            name: {
                key: torch.cat(parts) if len(parts) > 1 and parts[0].dim() else parts[0] for key, parts in of.items()
            }
            for name, of in found.items()
        }

    def _say_first(self) -> None:
        """Before whatever is said next, each time: the one before may be lost, or void."""
        for metrics in self.measured:
            self._shards[0].client.say(metrics=metrics)
        if self.stop_reason:
            self._shards[0].client.say(stop={"reason": self.stop_reason})

    def leave(self, goodbye: Goodbye) -> None:
        """Say goodbye, with the metrics of the final evaluation if there are any."""
        metrics = {name: value for name, value in goodbye.metrics.items() if not math.isnan(value)}
        if goodbye.finished:
            self._say_first()
        for shard in self._shards:
            shard.leave(goodbye._replace(metrics=metrics))
        self.drop()

    def drop(self) -> None:
        """Leave without a word, as a process that fails does."""
        self._heartbeat.stop()
        for shard in self._shards:
            shard.client.close()
        if self._traces is not None:
            self._traces.close()
        self._pool.dismiss()
        if self._model is not None:
            for shard in self._shards:
                shard.transfer.leave_segment()
        self._history.close()
