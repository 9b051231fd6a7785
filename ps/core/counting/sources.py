"""What the metrics of a worker are read from, on a server and in a simulation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ....common.reporting.status import RECORDED
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
