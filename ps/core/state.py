"""The state of a run: everything that its events change. Snapshots keep a part of it, and shards compare another.

Options that a control has set (`controls.py`) are in snapshots too. A server drops one when its configuration has a new
value of the same option."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...common.errors import CheckpointError, ParamServerError
from ...common.reporting.curve import Curve
from ...common.wire.records import Row
from ..policies.base import Policy
from .contributions import Contributions
from .counting import MOST_BINS, Length
from .roster import Roster, Worker
from .snapshot_rhythm import Rhythm

LR_SCALE = "lr_scale"
MOST_LR_SCALE = 1e6


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


class RunState:
    """One run from the first join to the final weights. `name` and `incarnation` (of the server) identify it."""

    def __init__(self, options: Options, policy: Policy, name: str, incarnation: int = 1) -> None:
        self.options, self.mode, self.policy = options, options.mode, policy
        self.name, self.incarnation = name, incarnation
        self.roster = Roster(options.num_workers, options.max_workers, options.lease_s)
        self.rhythm = Rhythm(options.keeps_snapshots, options.every_steps, options.every_s)
        self.contributions = Contributions(policy, self.roster, self.rhythm, options.mode, options.max_rejected)
        self.model: tuple[str, str] | None = None  # names of the model and optimizer of all workers
        self.may_change_optimizer = False  # the first worker of a resumed run sets its hyperparameters
        self.has_weights = False
        self.initializer: Worker | None = None  # the worker that uploads the initial or final weights
        self.is_holding = False  # all wait for the first snapshot: without one, a lost server ends the run
        self.is_closed = False  # events have no effect any more
        self.is_done = False  # all workers were notified that the run is over
        self.asked: int | None = None  # the rank that is then asked for metrics of the final weights
        self.may_ask = True  # False: a worker of another server is asked
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
        return sorted(rank for rank, lost_at in self.lost_at.items() if lost_at > at - self.options.absent_s)

    @property
    def was_over_before(self) -> bool:
        """Whether the snapshot was taken at the end: every needed rank had taken all its training steps, or had
        finished by itself. With another configured length, ranks of the second kind are asked again."""
        is_complete = len(self.policy.rows) >= (self.options.num_workers or 1)
        ranks = self.policy.rows.keys() - (() if self.length.is_reconfigured else self.policy.finished_ranks)
        return is_complete and all(map(self.policy.is_through, ranks))

    @property
    def has_training_ended(self) -> bool:
        """Whether all workers were notified of the end, or none is left: the clock of the summary stops."""
        return self.is_done or not self.roster.workers

    # ---- in snapshots, and on other shards ---------------------------------------------------------

    def saved(self, at: float) -> dict[str, Any]:
        """Returns the JSON that a snapshot keeps beside the tensors. Contributions of an open round are not in it."""
        behind = Counter(self.contributions.staleness)
        stats = {str(rank): entry.saved() for rank, entry in self.roster.stats.items()}
        for pending in self.contributions.uncommitted():
            stats[str(pending.rank)]["staleness_sum"] -= pending.staleness
            behind[min(MOST_BINS, pending.staleness)] -= 1
        return {
            "run": self.name,
            "server_incarnation": self.incarnation,
            "policy": self.policy.saved_state(),
            "rows": dict(self.policy.committed),
            "num_joins": dict(self.roster.num_joins),
            "training": {
                "elapsed_s": self.contributions.elapsed_s(at, self.has_training_ended),
                "stats": stats,
                "staleness": {str(versions): count for versions, count in behind.items() if count},
                "out": sorted(self.policy.finished_ranks),
                **self.length.saved(),
                "curve": self.curve.saved(),
                "controls": {
                    LR_SCALE: self.contributions.lr_scale,
                    "changed": {name: list(values) for name, values in self.changed.items()},
                    "evicted": sorted(self.roster.evicted),
                },
                "data_samples": self.contributions.data.num_samples,
                "rates": self.contributions.rates.saved(),
            },
        }

    def restore(self, version: int, model: tuple[str, str], saved: dict[str, Any], source: str = "") -> None:
        """Continue from the snapshot `source` of `model` (names of model and optimizer, as in `Offered`), before any
        event. Raises CheckpointError when the mode cannot."""
        self.model = model
        self.name, self.incarnation = saved["run"], saved["server_incarnation"] + 1
        self.roster.restore(saved["num_joins"])
        self.policy.finished_ranks = {rank for rank in saved["training"].get("out", ()) if isinstance(rank, int)}
        try:
            rows = {int(rank): Row(*row) for rank, row in saved["rows"].items()}
            self.policy.restore(version, rows, saved["policy"])
        except Exception as error:
            problem = f"mode {self.options.mode} cannot go on from snapshot {source}: its restore of "
            problem += f"{saved['policy']!r:.80} raised {type(error).__name__}: {error}"
            fix = "correct the mode's restore, or start a new run with --resume never"
            raise CheckpointError(problem, fix=fix) from error
        self.length.restore(saved["training"])
        self.contributions.restore(saved["training"])
        self.curve.restore(saved["training"].get("curve"))
        self._restore_controls(saved["training"].get("controls"))
        self.rhythm.restore(version, self.policy.min_steps_done)
        ranks = sorted(self.policy.rows.keys() - self.policy.finished_ranks)
        self.returning = [rank for rank in ranks if not self.policy.is_through(rank)]
        self.has_weights = self.may_change_optimizer = True

    def _restore_controls(self, saved: Any) -> None:
        """Apply the options that were set during the run; absent and malformed values are dropped."""
        if not isinstance(saved, dict):
            return
        policy, scale, changed = self.policy, saved.get(LR_SCALE), saved.get("changed")
        if isinstance(scale, int | float) and 0 <= scale <= MOST_LR_SCALE:
            self.contributions.lr_scale = float(scale)
        configured = policy.options.model_dump(mode="json")
        for name, pair in changed.items() if isinstance(changed, dict) else ():
            match pair:
                case [before, after] if name not in policy.changeable or configured.get(name) == before:
                    self.changed[name] = before, after
        if values := {name: self.changed[name][1] for name in self.changed.keys() & policy.changeable}:
            with suppress(ValueError):
                policy.change(policy.options_with(values), 0.0)

    def digest(self) -> str:
        """Returns a digest of everything that decides; equal on all shards after the same events."""
        workers = self.roster.workers.items()
        seats = {
            rank: [it.incarnation, it.model, it.is_away, it.is_finished, it.hyperparameters] for rank, it in workers
        }
        initializer = self.initializer and [self.initializer.rank, self.initializer.incarnation]
        evicted, scale = sorted(self.roster.evicted), self.contributions.lr_scale
        set_ = [self.mode, self.policy.options.model_dump(), self.changed, scale, evicted]
        flags = [self.has_weights, self.is_holding, self.is_closed, self.is_done, self.model, initializer, self.lost_at]
        end = [self.has_finished, self.asked, self.ended_by, self.length.by, len(self.curve.points)]
        state = [self.policy.full_state(), seats, set_, self.roster.num_joins, flags, end, self.rhythm.state()]
        return hashlib.sha256(json.dumps(state, sort_keys=True, default=str).encode()).hexdigest()[:16]


def not_json(state: dict[str, Any]) -> str:
    """Returns the first entry that JSON does not preserve, as a phrase; empty where there is none."""
    for key, value in state.items():
        try:
            is_same = json.loads(json.dumps({key: value})) == {key: value}
        except (TypeError, ValueError, RecursionError):
            is_same = False
        if not is_same:
            return f"{key!r} of its saved_state is {value!r:.80}"
    return ""
