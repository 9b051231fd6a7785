"""The results of a run, as written by `--summary` and read by the launcher's comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..config.conditions import Condition
from ..wire.json_text import to_json
from .curve import Figure, Point

Number = TypeVar("Number", int, float)


def total_or_unknown(numbers: Iterable[Number | None]) -> Number | None:
    """Their sum; None where one is not known."""
    total: Number = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


class WorkerSummary(BaseModel):
    """One rank, over all its incarnations. Times in seconds, sums over the run."""

    rank: int
    steps: int = 0  # training steps in its accepted contributions
    contributions: int = 0  # accepted; with local steps each has several training steps
    samples: int | None = 0  # None: nobody said how many a step has (session.shard, session.record(num_samples=))
    staleness_mean: float = 0.0  # versions, over accepted contributions
    staleness_max: int = 0
    lead_max: int = 0  # contributions ahead of the slowest live worker, after one
    compute_s: float = 0.0
    wait_s: float = 0.0  # held by the mode, or by a round that was not complete
    transfer_s: float = 0.0
    bytes_sent: int = 0  # by the worker, framing included
    bytes_received: int = 0
    bytes_among: int = 0  # sent to other workers, where they average among themselves: as a ring would
    restarts: int = 0  # processes that have taken the rank after its first
    dropped: int = 0  # contributions that came after their round had closed
    rejected: int = 0  # contributions with NaN or Inf, or beyond store.max_norm; no steps
    skipped: int = 0  # steps of which nothing was folded, for the same reasons
    clipped: int = 0  # contributions folded with such values as 0, or scaled down to store.max_norm
    residual: Figure = 0.0  # norm of what worker.codec kept back, at the end
    residuals_lost: int = 0  # how often what was kept back was lost: a new process, a START, values not finite
    residual_lost: Figure = 0.0  # norms of it in all; of a process that was gone as before its last contribution
    lane: str = "grpc"  # how its tensors travelled last: "grpc", "direct" or "shared memory"
    lane_reason: str = ""  # why not in a way that the worker prefers
    codec: str = "raw"  # of its last contribution; auto's choice


class ShardSummary(BaseModel):
    """One server process of several; `bytes` it held at the end, by what they are."""

    shard: int
    version: int = 0
    bytes: dict[str, int] = Field(default_factory=dict)

    @property
    def lasting_bytes(self) -> int:
        """Without the mean of a round, which is there during a round only."""
        return sum(count for name, count in self.bytes.items() if name != "mean")


class Cost(BaseModel):
    """What the run's machines have cost, from its first answer to its last contribution."""

    currency: str
    total: float
    waiting: float  # of that, while workers were held by the mode: their share of waiting
    per_epoch: float | None = None  # where it is known how many samples an epoch has

    @classmethod
    def of(cls, currency: str, per_hour: float, wall_s: float, wait_share: float, epochs: float | None) -> Cost:
        total = per_hour * wall_s / 3600
        per_epoch = total / epochs if epochs else None
        return cls(currency=currency, total=total, waiting=total * wait_share, per_epoch=per_epoch)

    def __str__(self) -> str:
        each = f", {price(self.per_epoch)} an epoch" if self.per_epoch is not None else ""
        return f"{price(self.total)} {self.currency}{each}; {price(self.waiting)} for waiting"


def price(amount: float) -> str:
    """Two decimals, or two digits of what is less than a cent."""
    return f"{amount:,.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def _rate(steady: tuple[int, float], whole: tuple[int, float]) -> float:
    """In a second, of the steady part, where it is known, or of the whole run."""
    count, seconds = steady if steady[1] > 0 else whole
    return count / seconds if seconds > 0 else 0.0


class Summary(BaseModel):
    """One run. `updates` counts optimizer steps or averages committed; `version` where it ended."""

    model_config = ConfigDict(extra="ignore")

    mode: str
    staleness_bound: int | None = None
    local_steps: int = 1
    updates: int = 0
    version: int = 0
    cosine: float | None = None  # between mean deltas of successive rounds, mean over them (diloco); of shard 0's part
    gain: float | None = None  # what the outer momentum makes of a direction that goes on so
    wall_s: float = 0.0  # from the first answer with weights to the last contribution
    step_s: float = 0.0  # of a training step of each worker, once all had taken their first; 0: not known
    # From the moment when every worker had taken its first training step, which loads much, to the last contribution:
    # seconds, and what all workers did in them. 0: not known.
    steady_s: float = 0.0
    steady_samples: int = 0
    steady_steps: int = 0
    staleness: dict[int, int] = Field(default_factory=dict)  # contributions by versions behind; 64: and more
    ended_by: str = ""  # who stopped it and why, or what failed; empty: all steps were taken
    final: dict[str, Figure] = Field(default_factory=dict)  # what the task's evaluation returned
    curve: list[Point] = Field(default_factory=list)  # evaluations, the final one included where there were others
    best: Point | None = None  # of them
    trained: list[Point] = Field(default_factory=list, exclude=True)  # training loss on its way, for reports
    workers: list[WorkerSummary] = Field(default_factory=list)
    cost: Cost | None = None  # where prices are known
    shards: list[ShardSummary] = Field(default_factory=list)  # where the server is several processes

    @model_validator(mode="before")
    @classmethod
    def _with_contributions(cls, data: Any) -> Any:
        """Older files count contributions as steps. A last contribution of fewer local steps is then counted whole."""
        workers, local_steps = (data.get("workers"), data.get("local_steps", 1)) if isinstance(data, dict) else ((), 1)
        if not workers or not all(isinstance(one, dict) and "contributions" not in one for one in workers):
            return data
        counts = [one.get("steps", 0) for one in workers]
        pairs = zip(workers, counts, strict=True)
        return {**data, "workers": [{**one, "contributions": n, "steps": n * local_steps} for one, n in pairs]}

    @property
    def label(self) -> str:
        """`ssp (staleness 3)`, `localsgd (8 local steps)`, `sync`."""
        if self.staleness_bound is not None:
            return f"{self.mode} (staleness {self.staleness_bound})"
        return f"{self.mode} ({self.local_steps} local steps)" if self.local_steps > 1 else self.mode

    @property
    def num_samples(self) -> int | None:
        """None where they are not known of some worker."""
        return total_or_unknown([worker.samples for worker in self.workers])

    def points_of(self, figure: str) -> list[Point]:
        """The evaluations that have it; of `curve.TRAINED` statuses."""
        return [point for point in (*self.curve, *self.trained) if figure in point.figures]

    def reached(self, target: Condition) -> Point | None:
        """The first point at which it holds."""
        return next((point for point in self.points_of(target.figure) if target.holds(point.figures)), None)

    @property
    def num_steps(self) -> int:
        """Training steps of all workers."""
        return sum(worker.steps for worker in self.workers)

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all workers in a second, once every worker had taken its first training step. None: nobody said
        how many a step has."""
        if (samples := self.num_samples) is None:
            return None
        return _rate((self.steady_samples, self.steady_s), (samples, self.wall_s))

    @property
    def union_steps_per_s(self) -> float:
        """Steps of the union batch in a second, from the same moment: one has a training step of each worker. A worker
        alone that takes the batches of N as one (`single`) is compared with N workers by it."""
        steps = _rate((self.steady_steps, self.steady_s), (self.num_steps, self.wall_s))
        return steps / max(1, len(self.workers))

    @property
    def staleness_mean(self) -> float:
        weights = [worker.contributions or worker.steps for worker in self.workers]
        late = sum(worker.staleness_mean * weight for worker, weight in zip(self.workers, weights, strict=True))
        return late / sum(weights) if any(weights) else 0.0

    @property
    def staleness_max(self) -> int:
        return max((worker.staleness_max for worker in self.workers), default=0)

    @property
    def wait_share(self) -> float:
        """Waiting as a share (0..1) of the workers' compute, wait and transfer time together."""
        total = sum(worker.compute_s + worker.wait_s + worker.transfer_s for worker in self.workers)
        return sum(worker.wait_s for worker in self.workers) / total if total else 0.0

    @property
    def num_bytes(self) -> int:
        return sum(worker.bytes_sent + worker.bytes_received for worker in self.workers)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For a notebook."""
        from .pictures.cards import of_summary

        return of_summary(self).bundle()

    def text(self) -> str:
        """As JSON, for a file."""
        return to_json(self.model_dump(), indent=2) + "\n"
