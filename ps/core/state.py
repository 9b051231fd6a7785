"""The state of a run: everything that its events change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...common.errors import ParamServerError
from ...common.reporting.curve import Curve
from ..policies.base import Policy
from .contributions import Contributions
from .counting.length import Length
from .roster import Roster, Worker
from .snapshot_rhythm import Rhythm


@dataclass(frozen=True, slots=True)
class Options:
    """A run's part of the configuration."""

    mode: str = ""
    num_workers: int | None = None
    max_workers: int = 1024  # where num_workers is None
    lease_s: float = 5.0
    absent_s: float = 15.0  # time that the end waits for a rank lost before its last training step
    max_rejected: int = 10  # contributions of one worker in a row that end the run
    keeps_snapshots: bool = False
    best: str | None = None  # the metric that decides
    keeps_best: bool = False  # the weights of the best evaluation
    stop_when: str | None = None
    patience: int | None = None
    epochs: int | None = None  # length of the run; workers announce the number of training steps
    every_steps: int | None = None  # training steps between two snapshots
    every_s: float | None = None
    waits_for_first_snapshot: bool = False  # several shards: without a snapshot a lost shard ends the run
    is_region: bool = False  # this run is one worker of another: a snapshot is an exchange with that run


class RunState:
    """One run from the first join to the final weights. `name` and `incarnation` (of the server) identify it."""

    def __init__(self, options: Options, policy: Policy, name: str, incarnation: int = 1) -> None:
        self.options = options
        self.mode = options.mode
        self.policy = policy
        self.name = name
        self.incarnation = incarnation
        self.roster = Roster(options.num_workers, options.max_workers, options.lease_s)
        self.rhythm = Rhythm(options.keeps_snapshots, options.every_steps, options.every_s)
        self.rhythm.needs_final = options.is_region
        self.contributions = Contributions(policy, self.roster, options.mode, options.max_rejected)
        self.model: tuple[str, str] | None = None  # names of the model and optimizer of all workers
        self.may_change_optimizer = False  # the first worker of a resumed run sets its hyperparameters
        self.has_weights = False
        self.initializer: Worker | None = None  # the worker that uploads the initial or final weights
        self.is_holding = False  # all workers wait for the first snapshot on all shards
        self.is_closed = False  # events have no effect any more
        self.is_done = False  # all workers were notified that the run is over
        self.evaluator: int | None = None  # the rank that then evaluates the final weights
        self.may_evaluate = True  # False: a worker of another region evaluates them
        self.has_finished = False  # some worker takes no more steps
        self.ended_by = ""  # why the run ended early; empty: all steps were taken
        self.failure: ParamServerError | None = None  # of a worker, after the last training step
        self.final: dict[str, float] = {}
        self.curve = Curve(options.best, options.stop_when, options.patience)  # of evaluations during the run
        self.length = Length(policy, options.epochs)
        # Options that were set during the run, by name: the configured value, and the new one.
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.lost_at: dict[int, float] = {}  # by rank, before its last training step
        self.returning: list[int] = []  # ranks of a snapshot with steps left; they count as lost at the first join

    def absent(self, at: float) -> list[int]:
        """Returns the ranks that were lost recently, before their last training step."""
        since = at - self.options.absent_s
        return sorted(rank for rank, lost_at in self.lost_at.items() if lost_at > since)

    @property
    def is_any_rank_through(self) -> bool:
        """Whether some rank has taken all its training steps: its script may then leave without a goodbye."""
        return any(map(self.policy.is_through, self.policy.rows))

    @property
    def was_over_before(self) -> bool:
        """Whether the snapshot was taken at the end: every needed rank had taken all its training steps, or had
        finished by itself. With another configured length, ranks of the second kind are asked again."""
        counted = self.policy.rows
        is_complete = len(counted) >= (self.options.num_workers or 1)
        ranks = counted.keys() - (() if self.length.is_reconfigured else self.policy.finished_ranks)
        return is_complete and all(map(self.policy.is_through, ranks))

    @property
    def has_training_ended(self) -> bool:
        """Whether all workers were notified of the end, or none is left: the clock of the summary stops."""
        return self.is_done or not self.roster.workers
