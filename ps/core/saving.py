"""What of a run survives in snapshots, and what must be the same on every shard."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from ...common.errors import CheckpointError
from . import controls
from .counting.stats import bin_of

if TYPE_CHECKING:
    from .run import Run


def saved(run: Run, at: float) -> dict[str, Any]:
    """What a snapshot keeps beside the tensors; JSON. Contributions of an open round are not in the weights."""
    committed = run.policy.num_committed()
    stats, behind = {}, Counter(run.contributions.staleness)
    for rank, stats_entry in run.roster.stats.items():
        num_open = run.policy.num_counted.get(rank, 0) - committed.get(rank, 0)
        stats[str(rank)] = stats_entry.saved(num_open)
        behind.subtract(map(bin_of, stats_entry.newest_staleness(num_open)))
    return {
        "run": run.name,
        "server_incarnation": run.incarnation,
        "policy": run.policy.saved_state(),
        "steps": committed,
        "num_joins": dict(run.roster.num_joins),
        "training": {
            "elapsed_s": run.contributions.elapsed_s(at, run.is_over),
            "stats": stats,
            "staleness": {str(versions): count for versions, count in behind.items() if count},
            "out": sorted(run.policy.out),
            **run.length.saved(),
            "curve": run.curve.saved(),
            "controls": controls.saved(run),
            "batches": run.contributions.drawn.saved(),
            "rates": run.contributions.rates.saved(),
            "in_step": {str(rank): number for rank, number in run.policy.in_step.items()},
            "steps_done": {str(rank): steps for rank, steps in run.policy.committed_steps().items()},
        },
    }


def restore(run: Run, version: int, model: tuple[str, str], saved: dict[str, Any], source: str = "") -> None:
    """Go on from the snapshot `source` of `model` (names of model and optimizer, as in `Offered`), before any
    event. Raises CheckpointError when the mode cannot."""
    run.model = model
    run.name, run.incarnation = saved["run"], saved["server_incarnation"] + 1
    run.roster.restore(saved["num_joins"])
    run.policy.out = {rank for rank in saved["training"].get("out", ()) if isinstance(rank, int)}
    try:
        run.policy.restore(version, saved["steps"], saved["policy"])
        if (steps := _by_rank(saved["training"], "steps_done")) is not None:
            run.policy.count_from(steps)
        run.policy.in_step = _by_rank(saved["training"], "in_step") or {}
    except Exception as error:
        raise CheckpointError(
            f"mode {run.options.mode} cannot go on from snapshot {source}: its restore of {saved['policy']!r:.80} "
            f"raised {type(error).__name__}: {error}",
            fix="mend the mode's restore, or begin anew with --resume never",
        ) from error
    run.length.restore(saved["training"])
    run.contributions.restore(saved["training"])
    run.curve.restore(saved["training"].get("curve"))
    controls.restore(run, saved["training"].get("controls"))
    run.rhythm.restore(version, run.policy.min_steps_done)
    run.has_weights = run.may_change_optimizer = True


def digest(run: Run) -> str:
    """The same on all shards after the same events: of everything that decides."""
    seats = {
        rank: [worker.incarnation, worker.model, worker.is_away, worker.is_finished, worker.hyperparameters]
        for rank, worker in run.roster.workers.items()
    }
    initializer = run.initializer and [run.initializer.rank, run.initializer.incarnation]
    evicted, scale = sorted(run.roster.evicted), run.contributions.lr_scale
    set_ = [run.mode, run.policy.options.model_dump(), run.changed, scale, evicted]
    flags = [run.has_weights, run.is_holding, run.is_closed, run.is_done, run.model, initializer, run.lost_at]
    end = [run.has_finished, run.evaluator, run.ended_by, run.length.by, len(run.curve.points)]
    state = [run.policy.full_state(), seats, set_, run.roster.num_joins, flags, end, run.rhythm.state()]
    text = json.dumps(state, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _by_rank(training: dict[str, Any], name: str) -> dict[int, int] | None:
    """Counts of each rank, as `Run.saved` keeps them; None where they are not, as in older snapshots."""
    saved = training.get(name)
    if not isinstance(saved, dict) or not all(type(count) is int and count >= 0 for count in saved.values()):
        return None
    return {int(rank): count for rank, count in saved.items() if rank.removeprefix("-").isdecimal()}


def not_json(state: dict[str, Any]) -> str:
    """The first entry that JSON does not give back as it was, as a phrase; empty where there is none."""
    for key, value in state.items():
        try:
            is_same = json.loads(json.dumps({key: value})) == {key: value}
        except (TypeError, ValueError, RecursionError):
            is_same = False
        if not is_same:
            return f"{key!r} of its saved_state is {value!r:.80}"
    return ""
