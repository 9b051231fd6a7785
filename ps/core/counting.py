"""What a run counts for each rank, and what workers announce: data, length of the run, learning rates."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ...common.errors import ParamServerError, Reason, refusal, same_batches
from ...common.reporting.metrics import Presence
from ...common.reporting.summary import RECORDED
from ...common.wire.records import RateInfo, ResidualInfo, Row
from ..policies.base import Policy
from .effects import Effect, Log

# ---- what each rank did --------------------------------------------------------------------------
# Counts for each rank, over all its incarnations, and the source of its metrics, on a server and in a simulation.


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


# ---- what workers announce -----------------------------------------------------------------------
# What workers announce about their data, the length of the run, their hyperparameters and learning rates.


Groups = tuple[dict[str, Any], ...]
_ROUNDINGS = 1e-9  # relative


class Data:
    """What workers say of their data with their first contributions."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], int] = {}  # rank, by the version it began with and digest
        self._began: dict[int, tuple[int, int]] = {}  # version and digest of each rank's newest first contribution
        self.twins: dict[int, int] = {}  # by rank, until it is notified: another with the same first result
        self.num_samples: int | None = None  # of the data set, also before a snapshot; None: no worker has said it
        self._is_said = False

    def record(self, rank: int, version: int, digest: int) -> Iterator[Effect]:
        """Record a digest of the result of a worker's first contribution; 0: unknown. Warns once of equal ones."""
        before, newest = self._began.get(rank), (version, digest)
        if before is not None and self._firsts.get(before) == rank:
            del self._firsts[before]
        self._began[rank] = newest
        # Another rank whose first result, from the same weights, is the same.
        if digest and (other := self._firsts.setdefault(newest, rank)) != rank:
            self.twins |= {rank: other, other: rank}
            if not self._is_said:
                self._is_said = True
                yield Log("warning", "same_batches", same_batches(other, rank))

    def differs(self, rank: int, num_samples: int) -> ParamServerError | None:
        """Returns the refusal of a rank whose data set has another length than the run's. 0 samples: unknown."""
        if not num_samples or self.num_samples in (None, num_samples):
            self.num_samples = num_samples or self.num_samples
            return None
        problem = f"the data set that rank {rank} gives to session.shard() has {num_samples:,} samples, and the run's "
        problem += f"has {self.num_samples:,}: the ranks' positions in it would not fit"
        fix = "give every worker the whole data set, the same as before a resume; or a DataLoader of its own instead "
        fix += "of session.shard(); worker.accept_other_data=true (PS_WORKER__ACCEPT_OTHER_DATA=1) goes on with it"
        return refusal(Reason.RUN_MISMATCH, problem, fix=fix)


class Length:
    """The training steps of a run whose configuration has none: the first worker to announce a number decides. They are
    kept in `policy.training_steps`. `by` is the rank that set it; None: no worker did."""

    def __init__(self, policy: Policy, epochs: int | None) -> None:
        self.policy, self._epochs = policy, epochs
        self._configured = [policy.training_steps, epochs]  # of the configuration
        self.by: int | None = None
        self.is_reconfigured = False  # the snapshot's run had another configured length
        self._others: set[int] = set()  # ranks that announced another length

    def announced(self, rank: int, steps: int) -> Iterator[Effect]:
        """A worker announces the length that follows from its data set or its task."""
        has, fields = self.policy.training_steps, {"rank": rank, "steps": steps}
        if has is None:
            self.policy.training_steps, self.by = steps, rank
            yield Log("info", "length", fields)
        elif self.by is not None and has != steps and rank not in self._others:
            self._others.add(rank)
            meaning = f"the run has {has} training steps (rank {self.by}), rank {rank} would take {steps}"
            fix = "give every worker the same data set and batch size, or set --steps"
            yield Log("warning", "lengths_differ", {**fields, "meaning": meaning, "fix": fix})

    def saved(self) -> dict[str, Any]:
        announced = None if self.by is None else [self.policy.training_steps, self._epochs]
        return {"configured": self._configured, "length": announced}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `saved` returned, after the policy. Workers announce an absent length again."""
        self.is_reconfigured = saved.get("configured", self._configured) != self._configured
        match saved.get("length"):
            case [int(steps), epochs] if self.policy.training_steps is None and epochs == self._epochs:
                self.policy.training_steps, self.by = steps, min(self.policy.rows, default=0)


def difference_of(rank: int, groups: Groups, other: int, known: Groups) -> ParamServerError | None:
    """Returns the refusal of a rank whose hyperparameters differ from those of another one at the same training step,
    where one step is made of the contributions of both; None where they agree."""
    if (difference := first_difference(known, groups)) is None:
        return None
    number, name = difference
    theirs, mine = (item[number].get(name) if number < len(item) else None for item in (known, groups))
    where = f" of parameter group {number}" if len(groups) > 1 else ""
    problem = f"rank {rank} has {name} {mine}{where} and rank {other} has {theirs}, at the same training step: "
    problem += "one step is made of the contributions of both"
    fix = "give all ranks the same hyperparameters and schedules (a schedule that follows a loss: the mean of all "
    fix += "ranks); or use a mode whose workers step by themselves, such as localsgd"
    return refusal(Reason.OPTIMIZER_MISMATCH, problem, fix=fix)


def first_difference(known: Groups, groups: Groups) -> tuple[int, str] | None:
    """Returns the number of the first group that differs, and the name of a value that does; None: none does.

    Up to roundings, which differ between machines: schedules compute with `math.cos`."""
    if known is groups or known == groups:
        return None
    for number in range(max(len(known), len(groups))):
        mine, theirs = (item[number] if number < len(item) else {} for item in (known, groups))
        for name in {**mine, **theirs}:
            if not _is_equal(mine.get(name), theirs.get(name)):
                return number, name
    return None


def _is_equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=_ROUNDINGS)
    return bool(mine == theirs)


class Rates:
    """The first and newest learning rates of all ranks' contributions.

    A new process of a rank receives both. It compares them with its own schedule, to find out whether the schedule
    continues or begins anew."""

    def __init__(self) -> None:
        self.of_rank: dict[int, RateInfo] = {}
        self.newest: dict[int, Groups] = {}  # by rank: the hyperparameters that its newest rates were taken from

    def counted(self, rank: int, hyperparameters: Groups, first: Sequence[float]) -> None:
        """Note the rates of a contribution that counts. `first` has the rates of its process's first step."""
        self.newest[rank] = hyperparameters
        last = tuple(rate_of(group) for group in hyperparameters)
        known = self.of_rank.get(rank) or RateInfo(tuple(first) or last, last, 0)
        self.of_rank[rank] = RateInfo(known.first, last, known.num_changes + (last != known.last))

    def saved(self) -> dict[str, list[Any]]:
        known = self.of_rank.items()
        return {str(rank): [list(item.first), list(item.last), item.num_changes] for rank, item in known}

    def restore(self, saved: Any) -> None:
        """Restore the rates of a snapshot; absent and malformed values are unknown."""
        for rank, groups in saved.items() if isinstance(saved, dict) else ():
            match groups:
                case [list(first), list(last), int(num_changes)] if rank.isdecimal() and _are_rates(first + last):
                    self.of_rank[int(rank)] = RateInfo(tuple(first), tuple(last), num_changes)


def rate_of(group: dict[str, Any]) -> float:
    """The learning rate of a group of hyperparameters; 0 where it has none."""
    rate = group.get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float) else 0.0


def _are_rates(found: list[Any]) -> bool:
    return all(type(item) in (int, float) and math.isfinite(item) for item in found)
