"""A connected worker as the run sees it, and what the run may say to it.

The service puts each of these into messages; nothing here knows how.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ...common.errors import ParamServerError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ...common.wire.segments import Segment
from ..core.membership import Seat
from ..core.stats import WorkerStats
from ..tensors.publication import Publication


@dataclass(frozen=True)
class SendWeights:
    """To a worker: bring the initial weights."""


@dataclass(frozen=True)
class Waiting:
    """To a worker: nothing yet, and why."""

    reason: str


@dataclass(frozen=True)
class Go:
    """To a worker: go on with weights of at least `min_version`."""

    outcome: str  # START, APPLIED, REPEATED, DROPPED, REJECTED
    min_version: int
    staleness: int
    held_s: float
    reason: str


@dataclass(frozen=True)
class Done:
    """To a worker that has finished: the run is over, these weights are final."""

    min_version: int
    evaluate: bool


@dataclass(frozen=True)
class Refused:
    """To a worker: its call ends with this error."""

    error: ParamServerError


@dataclass(frozen=True)
class Measured:
    """What a worker says with a contribution about itself; seconds, and the mean training loss."""

    loss: float = math.nan
    compute_s: float = 0.0
    transfer_s: float = 0.0
    skew: int = 0  # versions between the parts of the weights it was computed on


@dataclass(eq=False)
class Worker:
    """One connected process. `outbox` holds what the service is to send to it."""

    seat: Seat
    stats: WorkerStats
    outbox: asyncio.Queue[SendWeights | Waiting | Go | Done | Refused] = field(default_factory=asyncio.Queue)
    state: str = "joining"
    waiting_since: float | None = None
    staleness: int = 0
    hyperparameters: list[Hyperparameters] | None = None
    interrupt: Callable[[], object] = lambda: None  # stops waiting for what the worker may send
    can_evaluate: bool = False
    process: str = ""  # as in Join: whose heartbeats count for it
    resumes: bool = False  # goes on where it was: no START is due
    is_admitted: bool = False  # it has said what it trains, to all shards
    offer: tuple[Layout, OptimizerSpec] | None = None  # what it trains, on a shard that is not to say whether it may
    is_seated: bool = False  # by another shard, the coordinator
    is_away: bool = False  # its stream is lost, its process is not
    wants_weights: bool = True
    segment: Segment | None = None  # the worker's own, on this host
    reading: Publication | None = None  # in shared memory

    @property
    def rank(self) -> int:
        return self.seat.rank

    def gets_weights(self, outcome: str) -> bool:
        """Whether the answer to its contribution carries weights; only what was applied may go without."""
        return self.wants_weights or outcome != "APPLIED"

    def refuse(self, error: ParamServerError) -> None:
        """End the worker's call, also while the service waits for its next message."""
        self.outbox.put_nowait(Refused(error))
        if self.state in ("computing", "uploading"):
            self.interrupt()

    def evict(self, error: ParamServerError) -> None:
        """The same to a worker that may never read another message."""
        self.outbox.put_nowait(Refused(error))
        self.interrupt()

    def pending_refusal(self) -> ParamServerError | None:
        """The refusal in the outbox, if there is one."""
        while not self.outbox.empty():
            item = self.outbox.get_nowait()
            if isinstance(item, Refused):
                return item.error
        return None
