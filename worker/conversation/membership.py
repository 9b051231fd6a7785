"""One worker's membership in a run: join, rejoin after a lost connection, leave."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable

from ...common.config.schema import WorkerConfig
from ...common.errors import Reason, refusal
from ...common.reporting.log import get_logger
from ...common.security import Credentials
from ...common.wire.records import GroupInfo, Reply
from ...proto import parameter_server_pb2 as pb
from ..session import Progress, Retry
from .channel import Lost, wait_for_server
from .heartbeat import Heartbeat
from .messages import Welcome, join_message
from .shard_set import ShardSet
from .threads import sleep

log = get_logger()

_ATTEMPT_S = 2.0  # for one attempt to connect


class GroupView:
    """The newest facts about all-reduce peers.

    `info` comes with the newest reply. `rendezvous` is this worker's address for peers, which the model message
    contains.
    """

    def __init__(self) -> None:
        self.info = GroupInfo()
        self.rendezvous = ""
        self.server_incarnation = 0
        # from the newest heartbeat reply: membership, server incarnation, newest generation that is over
        self._over = 0, 0, 0.0
        self.membership = 0  # the current one; only replies to its heartbeats are used

    def heartbeat_replied(self, membership: int, reply: pb.HeartbeatReply) -> None:
        """Called on the heartbeat's thread."""
        self._over = membership, reply.server_incarnation, math.inf if reply.is_gone else reply.over_generation

    def is_over(self, generation: int) -> bool:
        """Whether the server has released a member of this generation, or this worker."""
        membership, incarnation, over = self._over
        return (membership, incarnation) == (self.membership, self.server_incarnation) and generation <= over


class Membership:
    """Joins and rejoins the run. `welcome` is the newest Welcome, `progress` the worker's progress in the run."""

    welcome: Welcome
    region: tuple[str, int] | None = None  # its name and number of workers, if this process is its relay

    def __init__(self, config: WorkerConfig, rank: int | None, credentials: Credentials, group: GroupView) -> None:
        self._device, self._group = config.device, group
        self.retry = Retry(config.server, config.give_up_s, rank)
        self.progress = Progress(rank=rank, process=secrets.token_hex(8))
        self.shards = ShardSet(config, credentials, self.progress, self.retry)
        self.heartbeat = Heartbeat(lambda: self.shards.first.channel.address, credentials, group.heartbeat_replied)

    @property
    def ids(self) -> dict[str, int | None]:
        """Rank and incarnation, for logs and the history."""
        return {"rank": self.progress.rank, "incarnation": self.progress.incarnation}

    def _message(self, seated: Welcome | None = None) -> object:
        join = join_message(self.progress, socket.gethostname(), os.getpid(), self._device, seated)
        if self.region is not None:
            join.region, join.num_workers = self.region
        return join

    def join(self) -> None:
        """Connect until the server welcomes this worker. Raises UnreachableError after the give-up time."""
        progress = self.progress
        while True:
            try:
                welcome = self.shards.first.join(self._message(), _ATTEMPT_S)
                break
            except Lost as lost:
                wait_for_server(self.retry, lost)
        if progress.rank not in (None, welcome.rank):
            message = f"the server made rank {progress.rank} rank {welcome.rank}"
            raise refusal(Reason.BAD_REQUEST, message, fix="install the same version of paramserver on both")
        self.welcome = welcome
        progress.welcomed(welcome.run, welcome.rank, welcome.incarnation)
        progress.total_steps = welcome.settings.steps or progress.total_steps
        progress.pull_every = max(1, welcome.settings.pull_every)
        self.retry.rank = welcome.rank
        self._group.server_incarnation = welcome.server_incarnation
        heartbeat = pb.HeartbeatRequest(run=progress.run, rank=welcome.rank, process=progress.process)
        self._group.membership = self.heartbeat.start(heartbeat.SerializeToString(), welcome.lease_s)
        self.shards.connect(list(welcome.shards))

    def offer(self) -> None:
        """Offer the model to all shards, and negotiate the transports. Raises Lost."""
        kind = self.welcome.settings.contribution
        for shard in self.shards.all:
            if shard.number:
                try:
                    shard.join(self._message(self.welcome), _ATTEMPT_S)
                except Lost as lost:
                    raise self.shards.lost(shard, lost) from None
            shard.offer(self.shards.layout, self.shards.optimizer, kind, self.shards.codec, self._group.rendezvous)
        log.routine("tensors", transport=self.shards.transport, reason=self.shards.first.transports.reason)

    def rejoin(self, lost: Lost, begin: Callable[[], Reply]) -> Reply | None:
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
            self.join()
            try:
                self.offer()
                reply = None if self.welcome.resumed else begin()
            except Lost as again:
                lost = again
                continue
            log.info("resumed" if reply is None else "rejoined", **self.ids, seq=self.welcome.seq)
            return reply
