"""The state of a run that snapshots keep, and the state that must be equal on every shard."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from ...common.errors import CheckpointError
from . import changes
from .counting.stats import bin_of
from .state import RunState


class Saving(RunState):
    """A run that can be saved, restored and compared."""

    def saved(self, at: float) -> dict[str, Any]:
        """Returns the JSON that a snapshot keeps beside the tensors. Contributions of an open round are not in it."""
        committed = self.policy.num_committed()
        stats, behind = {}, Counter(self.contributions.staleness)
        uncommitted = self.contributions.uncommitted()
        for rank, stats_entry in self.roster.stats.items():
            num_open = self.policy.num_counted.get(rank, 0) - committed.get(rank, 0)
            unsaved = uncommitted[rank][-num_open:] if num_open else []
            stats[str(rank)] = stats_entry.saved(unsaved)
            behind.subtract(bin_of(staleness) for _, staleness, _ in unsaved)
        return {
            "run": self.name,
            "server_incarnation": self.incarnation,
            "policy": self.policy.saved_state(),
            "contributions": committed,
            "num_joins": dict(self.roster.num_joins),
            "training": {
                "elapsed_s": self.contributions.elapsed_s(at, self.has_training_ended),
                "stats": stats,
                "staleness": {str(versions): count for versions, count in behind.items() if count},
                "out": sorted(self.policy.finished_ranks),
                **self.length.saved(),
                "curve": self.curve.saved(),
                "controls": changes.saved(self),
                "batches": self.contributions.drawn.saved(),
                "data_samples": self.contributions.data.num_samples,
                "rates": self.contributions.rates.saved(),
                "in_step": {str(rank): number for rank, number in self.policy.in_step.items()},
                "steps_done": {str(rank): steps for rank, steps in self.policy.committed_steps().items()},
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
            self.policy.restore(version, saved["contributions"], saved["policy"])
            self.policy.in_step = _by_rank(saved["training"], "in_step") or {}
            if (steps := _by_rank(saved["training"], "steps_done")) is not None:
                self.policy.count_from(steps)
        except Exception as error:
            raise CheckpointError(
                f"mode {self.options.mode} cannot go on from snapshot {source}: its restore of {saved['policy']!r:.80} "
                f"raised {type(error).__name__}: {error}",
                fix="correct the mode's restore, or start a new run with --resume never",
            ) from error
        self.length.restore(saved["training"])
        self.contributions.restore(saved["training"])
        self.curve.restore(saved["training"].get("curve"))
        changes.restore(self, saved["training"].get("controls"))
        self.rhythm.restore(version, self.policy.min_steps_done)
        ranks = sorted(self.policy.num_counted.keys() - self.policy.finished_ranks)
        self.returning = [rank for rank in ranks if not self.policy.is_through(rank)]
        self.has_weights = self.may_change_optimizer = True

    def digest(self) -> str:
        """Returns a digest of everything that decides; equal on all shards after the same events."""
        seats = {
            rank: [worker.incarnation, worker.model, worker.is_away, worker.is_finished, worker.hyperparameters]
            for rank, worker in self.roster.workers.items()
        }
        initializer = self.initializer and [self.initializer.rank, self.initializer.incarnation]
        evicted, scale = sorted(self.roster.evicted), self.contributions.lr_scale
        set_ = [self.mode, self.policy.options.model_dump(), self.changed, scale, evicted]
        flags = [self.has_weights, self.is_holding, self.is_closed, self.is_done, self.model, initializer, self.lost_at]
        end = [self.has_finished, self.evaluator, self.ended_by, self.length.by, len(self.curve.points)]
        state = [self.policy.full_state(), seats, set_, self.roster.num_joins, flags, end, self.rhythm.state()]
        text = json.dumps(state, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _by_rank(training: dict[str, Any], name: str) -> dict[int, int] | None:
    """Returns the counts of each rank, as `Run.saved` keeps them; None where they are absent or malformed."""
    saved = training.get(name)
    if not isinstance(saved, dict) or not all(type(count) is int and count >= 0 for count in saved.values()):
        return None
    return {int(rank): count for rank, count in saved.items() if rank.removeprefix("-").isdecimal()}


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
