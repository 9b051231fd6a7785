"""The worker's side of the conversation: offer the model, contribute, finish; reconnect after a lost connection.

`Membership` joins and rejoins, `ShardSet` sends each request to all shards, and `GroupView` has the server's facts
about all-reduce peers. If the connection to any shard is lost, all connections are closed and made again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...common.config.schema import WorkerConfig
from ...common.errors import same_batches, shown
from ...common.reporting.history import History
from ...common.reporting.log import get_logger
from ...common.security import PLAINTEXT, Credentials
from ...common.tensors.optimizers import OptimizerSpec
from ...common.wire.records import NO_RESIDUAL, ContributionId, GroupInfo, Outcome, Reply, Timing, changed
from ..session import Retry
from ..tensors.transfer import ModelTensors
from ..transports.transport import Transports
from .channel import Lost
from .membership import GroupView, Membership
from .messages import Begun, Final, Goodbye, Outgoing, Settings, loses_replies, read_settings
from .shard import Shard
from .threads import sleep

if TYPE_CHECKING:
    from .tracing import ExchangeTraces

log = get_logger()

Pulled = TypeVar("Pulled")

_NO_GROUP = GroupInfo()


class Exchange:
    """One worker's conversation with the server (an `Exchanger`). Blocks. Raises the errors of `common/errors.py`."""

    def __init__(
        self,
        config: WorkerConfig,
        rank: int | None,
        history: str | None = None,
        credentials: Credentials = PLAINTEXT,
        region: tuple[str, int] | None = None,
    ) -> None:
        """`region`: its name and number of workers, if this process is its relay."""
        self.config, self.credentials = config, credentials
        self._traces: ExchangeTraces | None = None
        self._history = History(history) if history is not None else None
        self._last_transfer_s = 0.0
        self.measured: list[dict[str, Any]] = []
        self.stop_reason = ""
        self.group_view = GroupView()
        self._membership = Membership(config, rank, credentials, self.group_view)
        self._membership.region = region
        self.progress, self.shards = self._membership.progress, self._membership.shards
        self.retry = self._membership.retry  # while the server is lost
        self._membership.join()
        self.settings: Settings = read_settings(self._membership.welcome.settings)
        kind = self.settings.kind
        self._has_residual = config.codec != "raw" or kind.holds_differences
        self.shards.codec = "raw" if kind.has_peers else config.codec  # peers encode among themselves
        self.shards.has_fragments = self.settings.fragments > 1

    def measures(self, measure: Callable[[], Mapping[str, float]]) -> None:
        """Send what it returns with each heartbeat."""
        self._membership.heartbeat.measure = measure

    def trace(self, url: str | None) -> None:
        """Send a span of every exchange to `url` from now on. Raises UsageError without the extra package."""
        if url is not None:
            from .tracing import ExchangeTraces

            self._traces = ExchangeTraces(url, self.progress.rank)

    @property
    def server(self) -> str:
        return self.shards.first.channel.address

    @property
    def settings_bytes(self) -> bytes:
        """The run's settings, in the server's encoding."""
        return self._membership.welcome.settings.SerializeToString()

    @property
    def lease_s(self) -> float:
        """The server releases a worker after this many seconds without a heartbeat."""
        return self._membership.welcome.lease_s

    @property
    def begun(self) -> Begun | None:
        return self.shards.first.begun

    # ---- the beginning ------------------------------------------------------------------------

    def moved(self) -> None:
        self.shards.moved()

    def start(self, model: ModelTensors, optimizer: OptimizerSpec) -> None:
        self.shards.divide(model, optimizer)
        if {up := self.config.codec, down := self.config.reply_codec} != {"raw"}:
            meaning = "these encode contributions and weights on the wire; the server's own state stays exact"
            log.info("codecs", up=up, down=down, meaning=meaning)
        try:
            self._membership.offer()
            self._begin()
        except Lost as lost:
            self._membership.rejoin(lost, self._begin)

    def _begin(self) -> Reply:
        reply = self._replied(self.shards.each(Shard.begin))
        progress = self.progress
        progress.started(reply)
        if self._history is not None:
            self._history.write(
                "start",
                run=progress.run,
                **self._membership.ids,
                server_incarnation=self._membership.welcome.server_incarnation,
                seq=progress.row.seq,
                version=progress.version,
            )
        return reply

    def use_transports(self, names: tuple[str, ...]) -> None:
        """Reconnect, with the first of these transports that both sides can open."""
        config = self.config.model_copy(update={"transports": names})
        for shard in self.shards.all:
            shard.transports = Transports(config)
        self._membership.rejoin(Lost(f"changing transports to {', '.join(names)}"), self._begin)

    # ---- exchanging ---------------------------------------------------------------------------

    def contribute(self, outgoing: Outgoing) -> Reply:
        """Send a contribution to all shards. Returns the reply when the model has its weights (see `Exchanger`)."""
        started, progress = time.perf_counter(), self.progress
        name = progress.run, progress.rank or 0, progress.incarnation or 0, progress.row.seq + 1
        try:
            reply = self._exchange(outgoing)
        except Lost as lost:
            reply = self._contribute_again(lost, outgoing)
        if self._traces is not None:
            self._traces.end(*name, reply.result.gate_wait_s, reply.result.outcome.name)
        self._last_transfer_s = max(0.0, time.perf_counter() - started - reply.result.gate_wait_s)
        return reply

    def _exchange(self, outgoing: Outgoing) -> Reply:
        # Number the contribution, and add the facts that depend on the worker's progress.
        contribution, progress, seq = outgoing.contribution, self.progress, self.progress.row.seq + 1
        outgoing = outgoing.changed(
            id=ContributionId(progress.rank or 0, progress.incarnation, seq),
            base=changed(contribution.base, version=progress.version),
            timing=Timing(contribution.timing.compute_s, self._last_transfer_s),
            residual=self.shards.residual() if self._has_residual else NO_RESIDUAL,
        )
        if contribution.completion.generation or not (progress.wants_weights or contribution.training.evaluates):
            outgoing = outgoing.changed(training=changed(contribution.training, wants_weights=False))
        if self._membership.region is not None:
            name, _ = self._membership.region
            self._membership.region = name, contribution.counts.num_workers  # for the next join
        if self._traces is not None:
            self._traces.begin()
        self._send_pending()
        if self._history is not None:
            counts = contribution.counts
            self._history.write(
                "send", **self._membership.ids, seq=seq, base_version=progress.version, samples=counts.new_samples,
                num_steps=counts.num_steps, num_batches=counts.num_batches,
                **({"part": counts.part} if counts.part else {}),
            )  # fmt: skip
        return self._replied(self.shards.each(self._exchange_with, outgoing))

    def _exchange_with(self, shard: Shard, outgoing: Outgoing) -> Reply:
        shard.contribute(outgoing if outgoing.optimizer is None else self.shards.part_of(outgoing, shard))
        if self._traces is not None:
            self._traces.sent()
        received = shard.expect("reply")
        if self._traces is not None:
            self._traces.came()
        return shard.take(received)

    def _contribute_again(self, lost: Lost, outgoing: Outgoing) -> Reply:
        """Send the same contribution on new connections, until it gets a reply or the worker has to start again."""
        while True:
            reply = self._membership.rejoin(lost, self._begin)
            if reply is not None:
                return reply
            seq = self._membership.welcome.seq
            try:
                if seq <= self.progress.row.seq:
                    return self._exchange(outgoing)
                return self._replied(self.shards.each(Shard.ask_again, seq))
            except Lost as again:
                lost = again

    def _replied(self, replies: list[Reply]) -> Reply:
        """Note a reply of all shards, of which the model has all weights. Returns the coordinator's."""
        progress, reply, result = self.progress, replies[0], replies[0].result
        if self._has_residual:
            self.shards.count_lost()
        progress.server_incarnation = self._membership.welcome.server_incarnation
        progress.replied(reply)
        self.group_view.info = reply.group or _NO_GROUP
        self.measured.clear()
        if self._history is not None and result.outcome is not Outcome.START:  # `_begin` records a START
            fields = {"seq": result.seq, "version": result.version, "outcome": result.outcome.name}
            self._history.write("replied", **self._membership.ids, **fields)
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

    @property
    def replies_lose(self) -> bool:
        return loses_replies(self.config, self.settings)

    def pull_exact(self, model: ModelTensors) -> int:
        return self._until_reached(lambda: self.shards.pull_exact(model))

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
        """Write the run's Polyak average into the model."""
        self.shards.pull_averaged(model)

    def pull_optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        return self.shards.pull_optimizer()

    # ---- the end ------------------------------------------------------------------------------

    def finish(self, can_evaluate: bool) -> Final | None:
        progress = self.progress
        num_steps, is_early = progress.row.steps, not progress.is_done
        while True:
            try:
                self._send_pending()
                residual = self.shards.residual() if self._has_residual else NO_RESIDUAL
                finals = self.shards.each(Shard.finish, self._last_transfer_s, can_evaluate, residual)
            except Lost as lost:
                has_started = self._membership.rejoin(lost, self._begin) is not None
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
        metrics = {name: value for name, value in goodbye.metrics.items() if not math.isnan(value)}
        if goodbye.finished:
            self._send_pending()
        for shard in self.shards.all:
            shard.leave(goodbye._replace(metrics=metrics))
        self.drop()

    def drop(self) -> None:
        self._membership.heartbeat.stop()
        self.shards.close()
        if self._traces is not None:
            self._traces.close()
        if self._history is not None:
            self._history.close()
