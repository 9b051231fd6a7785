"""What the metrics of a worker are read from, on a server and in a simulation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ....common.reporting.folding import Presence
from ....common.reporting.status import RECORDED
from ....common.wire.records import Row
from ...policies.base import Policy
from .stats import WorkerStats


@dataclass(eq=False, slots=True)
class Traffic:
    """Of one rank with this process, over all its incarnations; bytes with their framing, without Waiting messages."""

    num_sent: int = 0  # by the worker
    num_received: int = 0
    num_peers: int = 0  # by the worker to other workers, as it says
    transport: str = "grpc"
    transport_reason: str = ""  # why it is no better one
    codec: str = "raw"  # of the newest contribution
    region: str = ""  # whose relay it is
    work: str = ""  # what the worker's process runs, as it says
    measured: Mapping[str, float] = field(default_factory=dict)  # by the worker's process, as it says
    recorded: Mapping[str, float] = field(default_factory=dict)  # by the worker's script

    def measure(self, values: Mapping[str, float]) -> None:
        """Take what a worker's process has measured, as its heartbeat says."""
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        self.recorded = {name[len(RECORDED) :]: known[name] for name in known if name.startswith(RECORDED)}
        self.measured = {name: value for name, value in known.items() if not name.startswith(RECORDED)}


def work_of(traffic: Mapping[int, Traffic]) -> str:
    """Return what the lowest rank says of what it runs; empty: no rank has said it."""
    works = [(rank, item.work) for rank, item in list(traffic.items()) if item.work]
    return min(works)[1] if works else ""


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """The source of one worker's metrics (`common/reporting/metrics.py`)."""

    rank: int
    policy: Policy
    stats: WorkerStats
    traffic: Traffic
    others: Collection[Mapping[int, tuple[int, int]]] = ()  # of each other shard: (bytes sent, received) by rank
    now: float = 0.0
    is_live: bool = False  # it is connected or away, and has not finished
    waiting_since: float | None = None

    @property
    def presence(self) -> Presence:
        newest = self.stats.recent[-1].at if self.stats.recent else -math.inf
        return Presence(self.is_live, self.stats.is_lost, newest)

    @property
    def recorded(self) -> Mapping[str, float]:
        return self.traffic.recorded

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second until now; None where a contribution came without their number."""
        return None if self.row.samples is None else self.stats.samples_per_s(self.now)

    @property
    def recent_s(self) -> tuple[float, float, float]:
        return self.stats.recent_s(self.now, self.waiting_since)

    @property
    def wait_s(self) -> float:
        """Seconds in all, with those of a wait that goes on."""
        waits_s = self.now - self.waiting_since if self.waiting_since is not None and self.stats.recent else 0.0
        return self.stats.wait_s + max(0.0, waits_s)

    @property
    def row(self) -> Row:
        return self.policy.row(self.rank)

    @property
    def lead(self) -> int:
        return self.policy.lead(self.rank) if self.rank in self.policy.members else 0

    @property
    def bytes_sent(self) -> int:
        return self.traffic.num_sent + sum(shard.get(self.rank, (0, 0))[0] for shard in self.others)

    @property
    def bytes_received(self) -> int:
        return self.traffic.num_received + sum(shard.get(self.rank, (0, 0))[1] for shard in self.others)

    @property
    def peer_bytes(self) -> int:
        return self.traffic.num_peers
