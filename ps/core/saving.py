"""The state of a run that snapshots keep, and the state that must be equal on every shard."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from ...common.errors import CheckpointError
from ...common.wire.records import Row
from . import changes
from .counting.stats import bin_of
from .state import RunState


class Saving(RunState):
    """A run that can be saved, restored and compared."""

    def saved(self, at: float) -> dict[str, Any]:
        """Returns the JSON that a snapshot keeps beside the tensors. Contributions of an open round are not in it."""
        behind = Counter(self.contributions.staleness)
        stats = {str(rank): entry.saved() for rank, entry in self.roster.stats.items()}
        for pending in self.contributions.uncommitted():
            stats[str(pending.rank)]["staleness_sum"] -= pending.staleness
            behind[bin_of(pending.staleness)] -= 1
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
                "controls": changes.saved(self),
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
        ranks = sorted(self.policy.rows.keys() - self.policy.finished_ranks)
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
