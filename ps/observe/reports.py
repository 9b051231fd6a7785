"""Where a run stands, for the live view and the Status call, and what it came to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import nsmallest

from ...common.reporting.status import Status, Total, WorkerStatus
from ...common.reporting.summary import Cost, ShardSummary, Summary, WorkerSummary
from ..core.counting.stats import WorkerStats
from ..engine.engine import Engine
from ..engine.peers import Traffic

_MOST_SHOWN = 64  # workers in a status: making it, sending it and drawing it do not grow with the run


def status(engine: Engine) -> Status:
    """Where the run stands."""
    run, now = engine.run, engine.now()
    is_one = engine.config.server.shards == 1
    versions = [state.version for state in engine.shard_states.values()]
    ranks = _shown(engine)
    stats, left_out = run.roster.stats, len(run.roster.stats) - len(ranks)
    why = engine.waiting(now, ranks)
    return Status(
        mode=engine.config.run.mode,
        version=run.policy.version,
        elapsed_s=round(engine.elapsed_s(), 2),
        step=run.policy.min_steps_done,
        steps=run.policy.training_steps or 0,
        num_joined=len(run.roster.workers),
        evaluated=run.curve.points[-1] if run.curve.points else None,
        waiting=_waiting_for_all(engine, now),
        workers=[_worker(engine, stats[rank], why) for rank in ranks],
        left_out=left_out,
        total=_total(stats.values()) if left_out else None,
        versions=[] if is_one else [run.policy.version, *versions],
        held_bytes=[shard.lasting_bytes for shard in _shards(engine)],
    )


def _shown(engine: Engine) -> list[int]:
    """The ranks that a status has a line for, ascending; of very many those that others may wait for."""
    policy, stats = engine.run.policy, engine.run.roster.stats
    if len(stats) <= _MOST_SHOWN:
        return sorted(stats)
    return sorted(nsmallest(_MOST_SHOWN, policy.members or stats, key=lambda rank: policy.num_counted.get(rank, 0)))


def _total(stats: Iterable[WorkerStats]) -> Total:
    losses, samples_per_s = [], 0.0
    for one in stats:
        samples_per_s += one.samples_per_s
        if math.isfinite(one.loss):
            losses.append(one.loss)
    return Total(loss=sum(losses) / len(losses) if losses else None, samples_per_s=round(samples_per_s, 1))


def _worker(engine: Engine, stats: WorkerStats, why: dict[int, str]) -> WorkerStatus:
    rank, policy = stats.rank, engine.run.policy
    compute, transfer, wait = stats.shares
    return WorkerStatus(
        rank=rank,
        state=state_of(engine, rank),
        step=policy.steps_done(rank),
        lead=policy.lead(rank) if rank in policy.members else 0,
        loss=stats.loss if math.isfinite(stats.loss) else None,
        samples_per_s=round(stats.samples_per_s, 1),
        compute_share=round(compute, 3),
        transfer_share=round(transfer, 3),
        wait_share=round(wait, 3),
        waiting_for=why.get(rank, ""),
        lane=engine.traffic.get(rank, Traffic()).lane,
        codec=engine.traffic.get(rank, Traffic()).codec,
    )


def state_of(engine: Engine, rank: int) -> str:
    """What a rank does: joining, waiting, uploading, computing, away, finished or gone."""
    worker = engine.run.roster.workers.get(rank)
    if worker is None:
        return "gone"
    peer = engine.peers.get((rank, worker.incarnation))
    return peer.state if peer is not None and not worker.is_away else "away"


def _waiting_for_all(engine: Engine, now: float) -> str:
    """What everyone waits for; empty when somebody may compute, or the run is over."""
    run = engine.run
    if missing := engine.why_not_ready():
        return missing
    if not run.roster.workers:
        return "" if run.is_any_rank_through else "a worker to join"
    return run.policy.waiting_reason(now) if run.has_weights else "the initial weights"


def summary(engine: Engine) -> Summary:
    """The results so far."""
    run = engine.run
    final = dict(run.final)
    if "loss" not in final:
        losses = [stats.loss for stats in run.roster.stats.values() if math.isfinite(stats.loss)]
        if losses:
            final["train_loss"] = sum(losses) / len(losses)
    cosine, gain = _direction(engine)
    found = Summary(
        mode=engine.config.run.mode,
        cosine=cosine,
        gain=gain,
        staleness_bound=run.policy.staleness_bound,
        local_steps=run.policy.local_steps,
        updates=run.policy.version,
        version=run.policy.version,
        wall_s=round(engine.elapsed_s(), 3),
        ended_by=run.ended_by,
        final=final,
        curve=run.curve.points,
        best=run.curve.best,
        workers=_workers(engine),
        shards=_shards(engine),
    )
    prices = engine.config.cost
    if prices.rate is not None:
        found.cost = Cost.of(prices.currency, prices.rate, found, run.contributions.epoch_samples)
    return found


def _direction(engine: Engine) -> tuple[float | None, float | None]:
    """Cosine rho between successive means, and with the outer momentum mu the gain 1 + mu / (1 - mu rho)."""
    outer, model = engine.run.policy.outer, engine.model
    direction = model.store.direction if model.has_weights else None
    if outer is None or direction is None or (cosine := direction.cosine) is None:
        return None, None
    momentum = float(outer.arguments.get("momentum", 0.0))
    return cosine, 1 + momentum / (1 - momentum * cosine)


def _workers(engine: Engine) -> list[WorkerSummary]:
    """Of each rank, with the bytes it has exchanged with all shards."""
    found = []
    for rank, stats in sorted(engine.run.roster.stats.items()):
        here = engine.traffic.get(rank, Traffic())
        elsewhere = [state.traffic.get(rank, (0, 0)) for state in engine.shard_states.values()]
        row = stats.summary()
        row.lane, row.lane_reason, row.codec = here.lane, here.lane_reason, here.codec
        row.bytes_sent = here.num_sent + sum(sent for sent, _ in elsewhere)
        row.bytes_received = here.num_received + sum(received for _, received in elsewhere)
        found.append(row)
    return found


def _shards(engine: Engine) -> list[ShardSummary]:
    if engine.config.server.shards == 1 or not engine.model.has_weights:
        return []
    states = {0: engine.state, **engine.shard_states}
    return [ShardSummary(shard=shard, version=one.version, bytes=one.bytes) for shard, one in sorted(states.items())]
