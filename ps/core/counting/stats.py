"""Counts for each rank, over all its incarnations, and the source of its metrics, on a server and in a simulation."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ....common.reporting.folding import Presence
from ....common.reporting.status import RECORDED
from ....common.wire.records import ResidualInfo, Row
from ...policies.base import Policy

# The live view's rates cover this many contributions.
_RECENT = 20
MOST_BINS = 64  # of the staleness; the last one holds what is beyond
# Of this process alone.
_NOT_SAVED = {"rank", "recent", "loss", "exchange_before", "joined_at", "is_lost"}


class Accepted(NamedTuple):
    """A contribution that counts. The seconds are the rank's sums at that time."""

    at: float
    samples: int | None
    compute_s: float
    transfer_s: float
    wait_s: float


def restored_bins(saved: Any) -> Counter[int]:
    """Returns the bins of a snapshot; malformed ones count from zero."""
    items = saved.items() if isinstance(saved, dict) else ()
    known = {int(behind): count for behind, count in items if behind.isdecimal() and type(count) is int}
    return Counter({min(MOST_BINS, behind): count for behind, count in known.items()})


@dataclass(slots=True)
class WorkerStats:
    """Sums of one rank; times in seconds."""

    rank: int
    staleness_sum: int = 0
    staleness_max: int = 0
    lead_max: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    num_joins: int = 0  # of processes that are new to the run
    dropped: int = 0
    rejected: int = 0
    rejected_in_a_row: int = 0
    skipped: int = 0
    clipped: int = 0
    residual: float = 0.0
    residuals_lost: int = 0
    residual_lost: float = 0.0
    residuals_told: int = 0  # of these, the number reported by the rank's present process
    residual_told: float = 0.0
    loss: float = math.nan
    exchange_before: tuple[int, float] = (0, 0.0)  # incarnation, its seconds in exchanges up to its last contribution
    recent: deque[Accepted] = field(default_factory=lambda: deque(maxlen=_RECENT))
    joined_at: float = -math.inf  # its present process; what is now counts from then
    is_lost: bool = False  # it left, and not in good order

    def accepted(self, staleness: int, num_samples: int | None, lead: int, now: float) -> None:
        self.staleness_sum += staleness
        if staleness > self.staleness_max:
            self.staleness_max = staleness
        if lead > self.lead_max:
            self.lead_max = lead
        self.rejected_in_a_row = 0
        self.recent.append(Accepted(now, num_samples, self.compute_s, self.transfer_s, self.wait_s))

    def joined_anew(self, at: float) -> None:
        """Another process has the rank: the residual of the earlier process is lost."""
        self.num_joins += 1
        self.joined_at = at
        self.residuals_lost += self.residual > 0
        self.residual_lost += self.residual
        self.residual, self.residuals_told, self.residual_told = 0.0, 0, 0.0

    def note_residual(self, residual_info: ResidualInfo) -> None:
        """Take the residual's norm from the worker, and add the losses since its last report."""
        norm, lost = residual_info.norm, residual_info.lost_norm if 0 < residual_info.lost_norm < math.inf else 0.0
        self.residuals_lost += max(0, residual_info.num_lost - self.residuals_told)
        self.residual_lost += max(0.0, lost - self.residual_told)
        self.residual, self.residuals_told = norm if 0 < norm < math.inf else 0.0, residual_info.num_lost
        self.residual_told = lost

    def exchange_s(self, incarnation: int) -> float:
        """Returns the seconds of the exchange before this contribution; -1 for a process's first."""
        total_s = self.transfer_s + self.wait_s
        before, before_s = self.exchange_before
        self.exchange_before = incarnation, total_s
        return total_s - before_s if before == incarnation else -1.0

    def saved(self) -> dict[str, int | float]:
        """What a snapshot keeps."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_SAVED}

    @classmethod
    def restored(cls, rank: int, values: dict[str, Any]) -> WorkerStats:
        """Returns the stats of a snapshot; absent and malformed values count from zero."""
        known = {name: value for name, value in values.items() if type(value) in (int, float)}
        names = {field.name for field in fields(cls)} - _NOT_SAVED
        return cls(rank, **{name: known[name] for name in names & known.keys()})

    def samples_per_s(self, now: float) -> float | None:
        """Samples per second from the process's oldest recent contribution until now; None where none are reported.

        So the rate of a worker that stands still decays.
        """
        since = self._since()
        if since is None or now <= since.at or self.recent[-1] is since:
            return 0.0
        samples = sum(accepted.samples or 0 for accepted in self.recent if accepted.at >= self.joined_at)
        return (samples - (since.samples or 0)) / (now - since.at)

    def recent_s(self, now: float, waiting_since: float | None) -> tuple[float, float, float]:
        """Returns the seconds of computing, transfer and waiting in the time of `samples_per_s`, until now."""
        waits_s = max(0.0, now - waiting_since) if waiting_since is not None else 0.0
        since = self._since()
        if since is None:
            return 0.0, 0.0, waits_s
        computes_s = 0.0 if waiting_since is not None else self.computes_s(now)
        compute_s, transfer_s = self.compute_s - since.compute_s + computes_s, self.transfer_s - since.transfer_s
        return compute_s, transfer_s, self.wait_s - since.wait_s + waits_s

    def computes_s(self, now: float) -> float:
        """Returns the seconds since the reply to the newest contribution, of a worker that does not wait."""
        newest = self.recent[-1] if self.recent else None
        return 0.0 if newest is None else max(0.0, now - newest.at - (self.wait_s - newest.wait_s))

    def _since(self) -> Accepted | None:
        """Returns the oldest recent contribution of the present process."""
        return next((accepted for accepted in self.recent if accepted.at >= self.joined_at), None)


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
    """Return the description of its work that the lowest rank sent; empty: no rank has sent one."""
    return min([(rank, item.work) for rank, item in list(traffic.items()) if item.work], default=(0, ""))[1]


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
