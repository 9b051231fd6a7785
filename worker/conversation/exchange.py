"""The worker's side of the conversation: join, offer the model, contribute, finish; rejoin after a lost connection.

`ShardSet` sends each request to all shards, and `GroupView` has the server's facts about all-reduce peers. If the
connection to any shard is lost, all connections are closed and made again.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...common.config.schema import Config, WorkerConfig
from ...common.errors import MismatchError, UsageError, bad_request, same_batches, shown
from ...common.reporting.history import History
from ...common.reporting.log import get_logger
from ...common.security import PLAINTEXT, Credentials
from ...common.tensors.optimizers import OptimizerSpec
from ...common.tensors.sharding import divide
from ...common.wire.protocol import layout_from_proto
from ...common.wire.records import NO_RESIDUAL, Base, ContributionId, GroupInfo, Outcome, Reply, Timing, changed
from ..session import Progress, Retry
from ..tensors.staged import make_transfer
from ..tensors.transfer import ModelTensors, part_of
from ..transports.limit import Limit
from ..transports.transport import Transports
from .channel import Channel, GroupView, Lost, MemberHeartbeat, Write, wait_for_server, worker_credentials
from .messages import (
    Begun,
    Final,
    Goodbye,
    Outgoing,
    Snapshot,
    StatusReply,
    Welcome,
    join_message,
    loses_replies,
    read_settings,
)
from .shard_set import Shard, ShardSet
from .threads import sleep

if TYPE_CHECKING:
    from .tracing import ExchangeTraces


log = get_logger()

Pulled = TypeVar("Pulled")

_NO_GROUP = GroupInfo()


class Exchange:
    """One worker's conversation with the server (an `Exchanger`). Blocks. Raises the errors of `common/errors.py`."""

    welcome: Welcome  # the newest

    def __init__(
        self,
        config: WorkerConfig,
        rank: int | None,
        history: str | None = None,
        credentials: Credentials = PLAINTEXT,
        joins_as: Mapping[str, Any] | None = None,
    ) -> None:
        """`joins_as`: further fields of its Join."""
        self.config, self.credentials, self._joins_as = config, credentials, joins_as or {}
        self._traces: ExchangeTraces | None = None
        self._history = History(history) if history is not None else None
        self._last_transfer_s = 0.0
        self.measured: list[dict[str, Any]] = []
        self.stop_reason = ""
        self.stays = True  # until the end, when the server may ask for metrics of the final weights
        self.group_view = GroupView()
        self.retry = Retry(config.server, config.give_up_s, rank)  # while the server is lost
        self.progress = Progress(rank=rank, process=secrets.token_hex(8))
        self.shards = ShardSet(config, credentials, self.progress, self.retry)
        self.heartbeat = MemberHeartbeat(
            lambda: self.shards.first.channel.address, credentials, self.group_view.heartbeat_replied
        )
        self._join()
        self.settings = self.shards.settings = read_settings(self.welcome.settings)
        self.replies_lose = loses_replies(config, self.settings)
        self._has_residual = config.codec != "raw" or self.settings.kind.holds_differences

    def trace(self, url: str | None) -> None:
        """Send a span of every exchange to `url` from now on. Raises UsageError without the extra package."""
        if url is not None:
            from .tracing import ExchangeTraces

            self._traces = ExchangeTraces(url, self.progress.rank)

    @property
    def server(self) -> str:
        return self.shards.first.channel.address

    @property
    def _ids(self) -> dict[str, int | None]:
        """Rank and incarnation, for logs and the history."""
        return {"rank": self.progress.rank, "incarnation": self.progress.incarnation}

    @property
    def begun(self) -> Begun | None:
        return self.shards.first.begun

    # ---- joining ------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connect until the server welcomes this worker. Raises UnreachableError after the give-up time."""
        progress = self.progress
        while True:
            try:
                welcome = self.shards.first.join(join_message(progress, self.config.device, self._joins_as))
                break
            except Lost as lost:
                wait_for_server(self.retry, lost)
        if progress.rank not in (None, welcome.rank):
            message = f"the server made rank {progress.rank} rank {welcome.rank}"
            raise bad_request(message, fix="install the same version of paramserver on both")
        is_other = progress.run not in ("", welcome.run) and welcome.settings != self.welcome.settings
        self.welcome = welcome
        progress.welcomed(welcome.run, welcome.rank, welcome.incarnation)
        if is_other:
            message = f"the restarted server began run {welcome.run}, with other settings than the one before it"
            raise MismatchError(message, fix="start the worker again to join the new run")
        progress.total_steps = welcome.settings.steps or progress.total_steps
        progress.pull_every = max(1, welcome.settings.pull_every)
        self.retry.rank = welcome.rank
        self.group_view.server_incarnation = welcome.server_incarnation
        self.group_view.membership = self.heartbeat.join(
            welcome.lease_s, run=progress.run, rank=welcome.rank, process=progress.process
        )
        self.shards.connect(list(welcome.shards))

    def _offer(self) -> None:
        """Offer the model to all shards, and negotiate the transports. Raises Lost."""
        kind, shards = self.welcome.settings.contribution, self.shards
        for shard in shards.all:
            if shard.number:
                seated = join_message(self.progress, self.config.device, self._joins_as, self.welcome)
                try:
                    shard.join(seated)
                except Lost as lost:
                    raise shards.lost(shard, lost) from None
            shard.offer(kind, self.group_view.rendezvous)
        log.routine("tensors", transport=shards.transport, reason=shards.first.transports.reason)

    def _rejoin(self, lost: Lost) -> Reply | None:
        """Rejoin after a lost connection. Returns the reply that says where to start; None: still a member.

        As a member the worker has nothing to start: the Welcome counts as many contributions as `progress`, or one
        more.
        """
        for shard in self.shards.all:
            shard.transfer.leave_segment()
        while True:
            for shard in self.shards.all:
                shard.stream.close_stream()
            log.warning("connection_lost", reason=str(lost), seq=self.progress.row.seq)
            sleep(self.retry.failed(time.monotonic(), str(lost)))
            self._join()
            try:
                self._offer()
                reply = None if self.welcome.resumed else self._begin()
            except Lost as again:
                lost = again
                continue
            log.info("resumed" if reply is None else "rejoined", **self._ids, seq=self.welcome.seq)
            return reply

    # ---- the beginning ------------------------------------------------------------------------

    def moved(self) -> None:
        self.shards.moved()

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self.shards.divide(model, optimizer)
        if {up := self.config.codec, down := self.config.reply_codec} != {"raw"}:
            meaning = "these encode contributions and weights on the wire; the server's own state stays exact"
            log.info("codecs", up=up, down=down, meaning=meaning)
        try:
            self._offer()
            self._begin()
        except Lost as lost:
            self._rejoin(lost)

    def _begin(self) -> Reply:
        reply = self._replied(self.shards.each(Shard.begin))
        progress = self.progress
        progress.started(reply)
        if self._history is not None:
            fields = {"server_incarnation": self.welcome.server_incarnation, "seq": progress.row.seq}
            self._history.write("start", run=progress.run, **self._ids, **fields, version=progress.version)
        return reply

    def use_transports(self, names: tuple[str, ...]) -> None:
        """Reconnect, with the first of these transports that both sides can open."""
        config = self.config.model_copy(update={"transports": names})
        for shard in self.shards.all:
            shard.transports = Transports(config)
        self._rejoin(Lost(f"changing transports to {', '.join(names)}"))

    # ---- exchanging ---------------------------------------------------------------------------

    def contribute(self, outgoing: Outgoing) -> Reply:
        """Send a contribution to all shards. Returns the reply when the model has its weights (see `Exchanger`).

        After a lost connection it sends the same contribution again, or, if that has counted, requests its reply.
        """
        started, progress = time.perf_counter(), self.progress
        reply, is_counted = None, False
        while reply is None:
            try:
                if is_counted:
                    reply = self._replied(self.shards.each(Shard.ask_again, self.welcome.seq))
                else:
                    reply = self._exchange(outgoing)
            except Lost as lost:
                reply = self._rejoin(lost)
                is_counted = self.welcome.seq > progress.row.seq
        if self._traces is not None:
            self._traces.end(reply.result)
        self._last_transfer_s = max(0.0, time.perf_counter() - started - reply.result.gate_wait_s)
        return reply

    def _exchange(self, outgoing: Outgoing) -> Reply:
        # Number the contribution, and add the facts that depend on the worker's progress.
        contribution, progress, seq = outgoing.contribution, self.progress, self.progress.row.seq + 1
        training = contribution.training
        if contribution.completion.generation or not (seq % progress.pull_every == 0 or training.wants_exact):
            training = changed(training, wants_weights=False)
        contribution = changed(
            contribution,
            id=ContributionId(progress.rank or 0, progress.incarnation, seq),
            base=Base(progress.version, contribution.base.has_all),
            timing=Timing(contribution.timing.compute_s, self._last_transfer_s),
            training=training,
            residual=self.shards.residual() if self._has_residual else NO_RESIDUAL,
        )
        if self._traces is not None:
            self._traces.begin(progress.run, contribution.id)
        if self.measured or self.stop_reason:
            self._send_pending()
        if self._history is not None:
            counts = contribution.counts
            self._history.write(
                "send", **self._ids, seq=seq, base_version=progress.version, samples=counts.new_samples,
                num_steps=counts.num_steps, num_batches=counts.num_batches,
                **({"part": counts.part} if counts.part else {}),
            )  # fmt: skip
        outgoing = outgoing._replace(contribution=contribution)
        return self._replied(self.shards.each(Shard.exchange, outgoing, self._traces))

    def _replied(self, replies: list[Reply]) -> Reply:
        """Note a reply of all shards, of which the model has all weights. Returns the coordinator's."""
        progress, reply, result = self.progress, replies[0], replies[0].result
        if self._has_residual:
            self.shards.count_lost()
        progress.server_incarnation = self.welcome.server_incarnation
        progress.replied(reply)
        self.group_view.info = reply.group or _NO_GROUP
        self.measured.clear()
        if self._history is not None and result.outcome is not Outcome.START:  # `_begin` records a START
            fields = {"seq": result.seq, "version": result.version, "outcome": result.outcome.name}
            self._history.write("replied", **self._ids, **fields)
        if (other := reply.next_work.same_batches_as) is not None:
            log.warning("same_batches", **same_batches(other, progress.rank or 0))
        if result.outcome is Outcome.REJECTED:
            log.warning("rejected", rank=progress.rank, seq=progress.next_number, reason=shown(result.reason, 2_000))
        return reply

    def pull_rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a table, [n, dim], for distinct and ascending ids.

        Waits for a lost server up to the give-up time. If the server went back, it discards the next contribution.
        """
        return self._until_reached(lambda: self.shards.pull_rows(table, ids))

    def pull_exact(self, model: ModelTensors) -> int:
        return self._until_reached(lambda: pull_newest([shard.channel for shard in self.shards.all], model))

    def _until_reached(self, pull: Callable[[], Pulled]) -> Pulled:
        """Pull; again while the server is lost, up to the give-up time."""
        retry = Retry(self.config.server, self.config.give_up_s, self.progress.rank)
        while True:
            try:
                return pull()
            except Lost as lost:
                sleep(retry.failed(time.monotonic(), str(lost)))
                self.shards.find_again(self.progress.run)

    def pull_averaged(self, model: ModelTensors) -> None:
        """Write the run's Polyak average into another instance of the model."""
        for shard in self.shards.all:
            pull_part(shard.channel, part_of(model, shard.share), averaged=True)

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        return self.shards.pull_optimizer()

    # ---- the end ------------------------------------------------------------------------------

    def finish(self) -> Final | None:
        progress = self.progress
        num_steps, is_early = progress.row.steps, not progress.is_done
        while True:
            try:
                self._send_pending()
                finals = self.shards.each(Shard.finish, self._last_transfer_s, self.stays, self.shards.residual())
            except Lost as lost:
                has_started = self._rejoin(lost) is not None
                if has_started and not progress.is_done and (not is_early or progress.row.steps < num_steps):
                    return None
                continue
            self.progress.received(finals[0].version)
            if self._history is not None:
                self._history.write("end", rank=self.progress.rank, seq=self.progress.row.seq)
            return finals[0]

    def _send_pending(self) -> None:
        """Send evaluations and the request to stop with every message, because an earlier message may be lost."""
        for metrics in self.measured:
            self.shards.first.stream.say(metrics=metrics)
        if self.stop_reason:
            self.shards.first.stream.say(stop={"reason": self.stop_reason})

    def leave(self, goodbye: Goodbye) -> None:
        for name in [name for name, value in goodbye.final_metrics.items() if math.isnan(value)]:
            del goodbye.final_metrics[name]
        if goodbye.finished:
            self._send_pending()
        for shard in self.shards.all:
            shard.stream.say(leave=goodbye)
            shard.stream.end_stream()
        self.drop()

    def drop(self) -> None:
        self.heartbeat.stop()
        self.shards.close()
        if self._traces is not None:
            self._traces.close()
        if self._history is not None:
            self._history.close()


# ---- reader --------------------------------------------------------------------------------------
# The connections of processes that read a run and do not train: they request its state and fetch weights.


_CONNECT_S = 1.0


class Reader:
    """Reads the run of `worker.server`.

    `name` names this process; the server retains a version for it. An evaluator has an empty name.
    """

    def __init__(self, config: Config, name: str = "") -> None:
        self.address = config.worker.server
        self._name = name
        self._credentials, self._limit = worker_credentials(config), Limit(config.worker.max_mbit)
        self._coordinator = Channel(self.address, self._credentials, self._limit)
        self._channels = {"": self._coordinator}  # of the shards, by address; the coordinator's is empty
        self._run = ""

    def standing(self) -> StatusReply:
        """Request the run's state from the server. Raises Lost, or the error with which the server refuses."""
        try:
            status = self._coordinator.status()
        except Lost:
            self._coordinator.turn()
            raise
        self._run = status.run
        return status

    def check_connection(self) -> None:
        """Wait for the server. Raises AuthError for wrong TLS settings, UnreachableError for another service."""
        with suppress(Lost):
            self._coordinator.connect(_CONNECT_S)

    def pull(self, model: ModelTensors) -> int | None:
        """Write the newest weights into the model.

        Returns their version, or None if the server is unreachable or has none. Raises UsageError for another model.
        """
        try:
            addresses = self._coordinator.shard_addresses(self._run) or [""]
            for address in addresses:
                if address not in self._channels:
                    self._channels[address] = Channel(address, self._credentials, self._limit)
            return pull_newest([self._channels[address] for address in addresses], model, self._name)
        except Lost:
            return None

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def pull_newest(channels: Sequence[Channel], model: ModelTensors, reader: str = "") -> int:
    """Write the newest weights of these shards into the model, without a codec. Returns their version.

    Raises Lost, and UsageError for another model than the run's.
    """
    version: int | None = None
    for channel, share in zip(channels, divide(model.layout, len(channels)), strict=True):
        which = {"keep": not reader and version is None, "reader": reader, "version": version}
        version = pull_part(channel, part_of(model, share), **which)
    assert version is not None
    return version


def pull_part(channel: Channel, part: ModelTensors, **which: Any) -> int:
    """Write one shard's weights, which the fields of PullRequest name, into its part of a model.

    Returns their version.
    """
    transfer, num_bytes = make_transfer(part), part.layout.total_bytes

    def begin(announced: Snapshot) -> Write:
        # An average may be written into a model that takes no part in the run.
        found = part.layout if which.get("averaged") else layout_from_proto(announced.tensors)
        if differences := found.differences(part.layout):
            message = f"the run trains a different model than this process has: {differences[0]}"
            raise UsageError(message, fix="give it the workers' script, or --task and task.args")
        if announced.payload_bytes != num_bytes:
            raise bad_request(
                f"the server sends {announced.payload_bytes} bytes of weights, this model has {num_bytes}"
            )
        return transfer.write

    version = channel.pull(begin, **which).version
    transfer.finish_write(num_bytes)
    return version
