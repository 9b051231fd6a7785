"""Where a run stands, for the live view and the Status call, and what it came to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...common.reporting.status import Status, WorkerStatus
from ...common.reporting.summary import ShardSummary, Summary, WorkerSummary
from ..shards.orders import ShardState

if TYPE_CHECKING:
    from ..core.run import Run
    from ..core.stats import WorkerStats


def status(run: Run) -> Status:
    """Where the run stands."""
    reasons = run.policy.waiting(run.now())
    is_one = run.config.server.shards == 1
    return Status(
        mode=run.config.run.mode,
        version=run.policy.version,
        elapsed_s=round(run.elapsed_s, 2),
        step=run.min_step,
        steps=run.config.run.steps,
        num_joined=len(run.workers),
        waiting=_waiting_for_all(run),
        workers=[_worker(run, stats, reasons) for _, stats in sorted(run.roster.stats.items())],
        versions=[] if is_one else [run.policy.version, *(state.version for state in run.shards.states.values())],
        held_bytes=[shard.lasting_bytes for shard in _shards(run)],
    )


def _worker(run: Run, stats: WorkerStats, reasons: dict[int, str]) -> WorkerStatus:
    worker = run.workers.get(stats.rank)
    compute, transfer, wait = stats.shares
    return WorkerStatus(
        rank=stats.rank,
        state=worker.state if worker else "gone",
        step=run.policy.steps_done(stats.rank),
        lead=run.policy.lead(stats.rank) if stats.rank in run.policy.members else 0,
        loss=stats.loss if math.isfinite(stats.loss) else None,
        samples_per_s=round(stats.samples_per_s, 1),
        compute_share=round(compute, 3),
        transfer_share=round(transfer, 3),
        wait_share=round(wait, 3),
        waiting_for=run.waiting_for(worker, reasons) if worker else "",
        lane=stats.lane,
    )


def _waiting_for_all(run: Run) -> str:
    """What everyone waits for; empty when somebody may compute, or the run is over."""
    if missing := run.shards.missing():
        return missing
    if not run.workers:
        return "" if run.is_any_rank_through() else "a worker to join"
    return run.policy.waiting_reason(run.now()) if run.model.has_weights else "the initial weights"


def summary(run: Run) -> Summary:
    """The results so far."""
    final = dict(run.final)
    if "loss" not in final:
        losses = [stats.loss for stats in run.roster.stats.values() if math.isfinite(stats.loss)]
        if losses:
            final["train_loss"] = sum(losses) / len(losses)
    return Summary(
        mode=run.config.run.mode,
        staleness_bound=run.policy.staleness_bound,
        local_steps=run.policy.local_steps,
        updates=run.policy.version,
        version=run.policy.version,
        wall_s=round(run.elapsed_s, 3),
        final=final,
        workers=_workers(run),
        shards=_shards(run),
    )


def _workers(run: Run) -> list[WorkerSummary]:
    """Of each rank, with the bytes it has exchanged with all shards."""
    found = []
    for rank, stats in sorted(run.roster.stats.items()):
        row = stats.summary()
        for state in run.shards.states.values():
            sent, received = state.traffic.get(rank, (0, 0))
            row.bytes_sent, row.bytes_received = row.bytes_sent + sent, row.bytes_received + received
        found.append(row)
    return found


def _shards(run: Run) -> list[ShardSummary]:
    if run.config.server.shards == 1 or not run.model.has_weights:
        return []
    states = {0: ShardState(run.policy.version, run.model.store.num_bytes), **run.shards.states}
    return [ShardSummary(shard=shard, version=one.version, bytes=one.bytes) for shard, one in states.items()]
