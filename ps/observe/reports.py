"""Where a run stands, for the live view and the Status call, and what it came to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import nsmallest

from ...common.reporting.curve import Point
from ...common.reporting.status import Status, Total, WorkerStatus
from ...common.reporting.summary import Cost, ShardSummary, Summary, WorkerSummary, total_or_unknown
from ...common.reporting.watched import Totals
from ..core.counting.stats import WorkerStats
from ..engine.engine import Engine
from ..engine.peers import Traffic

# Workers in a status: sending it and drawing it do not grow with the run. Making it adds up four numbers of each
# worker, shown or not: 7 ms with 10,000, on a machine that is busy with others.
_MOST_SHOWN = 64


def status(engine: Engine) -> Status:
    """Where the run stands."""
    run, now = engine.run, engine.now()
    is_one = engine.config.server.shards == 1
    versions = [state.version for state in engine.shard_states.values()]
    ranks = _shown(engine)
    stats, left_out = run.roster.stats, len(run.roster.stats) - len(ranks)
    passed = _bytes(engine, ranks)
    why = engine.waiting(now, ranks)
    return Status(
        mode=run.mode,
        version=run.policy.version,
        elapsed_s=round(engine.elapsed_s(), 2),
        step=run.policy.min_steps_done,
        steps=run.policy.training_steps or 0,
        num_joined=len(run.roster.workers),
        samples=total_or_unknown([one.known_samples for one in stats.values()]),
        num_bytes=_all_bytes(engine),
        evaluated=with_bytes(engine, run.curve.points[-1]) if run.curve.points else None,
        waiting=_waiting_for_all(engine, now),
        workers=[_worker(engine, stats[rank], why, passed) for rank in ranks],
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
    if policy.members:
        return sorted(policy.slowest_members(_MOST_SHOWN))
    return sorted(nsmallest(_MOST_SHOWN, stats, key=lambda rank: policy.num_counted.get(rank, 0)))


def _total(stats: Iterable[WorkerStats]) -> Total:
    of_each = [(one.loss, one.samples_per_s) for one in stats]
    losses, rate = [loss for loss, _ in of_each if math.isfinite(loss)], total_or_unknown([rate for _, rate in of_each])
    return Total(loss=sum(losses) / len(losses) if losses else None, samples_per_s=_rounded(rate))


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)


def _worker(
    engine: Engine, stats: WorkerStats, why: dict[int, str], passed: dict[int, tuple[int, int]]
) -> WorkerStatus:
    rank, policy = stats.rank, engine.run.policy
    compute, transfer, wait = stats.shares
    sent, received = passed.get(rank, (0, 0))
    traffic = engine.traffic.get(rank, Traffic())
    return WorkerStatus(
        rank=rank,
        state=state_of(engine, rank),
        step=policy.steps_done(rank),
        lead=policy.lead(rank) if rank in policy.members else 0,
        loss=stats.loss if math.isfinite(stats.loss) else None,
        samples_per_s=_rounded(stats.samples_per_s),
        compute_share=round(compute, 3),
        transfer_share=round(transfer, 3),
        wait_share=round(wait, 3),
        waiting_for=why.get(rank, ""),
        lane=traffic.lane,
        codec=traffic.codec,
        contributions=stats.contributions,
        samples=stats.known_samples,
        compute_s=round(stats.compute_s, 3),
        transfer_s=round(stats.transfer_s, 3),
        wait_s=round(stats.wait_s, 3),
        staleness_mean=round(stats.staleness_mean, 4),
        staleness_max=stats.staleness_max,
        bytes_sent=sent,
        bytes_received=received,
        restarts=max(0, stats.num_joins - 1),
    )


def _bytes(engine: Engine, ranks: Iterable[int]) -> dict[int, tuple[int, int]]:
    """What each of these has sent to all shards, and received; of other shards as they have said last."""
    found, none = {}, Traffic()
    for rank in ranks:
        here = engine.traffic.get(rank, none)
        others = [state.traffic.get(rank, (0, 0)) for state in engine.shard_states.values()]
        found[rank] = (
            here.num_sent + sum([sent for sent, _ in others]), here.num_received + sum([came for _, came in others])
        )  # fmt: skip
    return found


def _all_bytes(engine: Engine) -> int:
    here = sum([one.num_sent + one.num_received for one in engine.traffic.values()])
    return here + sum(sent + came for state in engine.shard_states.values() for sent, came in state.traffic.values())


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
    steady_s, samples, steps = run.contributions.steady()
    found = Summary(
        mode=run.mode,
        cosine=cosine,
        gain=gain,
        staleness_bound=run.policy.staleness_bound,
        local_steps=run.policy.local_steps,
        updates=run.policy.version,
        version=run.policy.version,
        wall_s=round(engine.elapsed_s(), 3),
        step_s=run.contributions.step_s,
        steady_s=round(steady_s, 6),
        steady_samples=samples,
        steady_steps=steps,
        staleness=dict(sorted(run.contributions.staleness.items())),
        ended_by=run.ended_by or _failure(engine),
        final=final,
        curve=[with_bytes(engine, point) for point in run.curve.points],
        best=with_bytes(engine, run.curve.best) if run.curve.best is not None else None,
        workers=_workers(engine),
        shards=_shards(engine),
    )
    prices = engine.config.cost
    if prices.rate is not None:
        epochs = _epochs(engine, found.num_samples)
        found.cost = Cost.of(prices.currency, prices.rate, found.wall_s, found.wait_share, epochs)
    return found


def _failure(engine: Engine) -> str:
    """What the run has ended with, where that is an error."""
    found = engine.finished.exception() if engine.finished.done() else None
    return str(found) if found is not None else ""


def with_bytes(engine: Engine, point: Point) -> Point:
    """Unknown of those before a start of this server."""
    return point.model_copy(update={"num_bytes": engine.bytes_when.get(point.version, point.num_bytes)})


def totals(engine: Engine, taken: Status) -> Totals:
    """What the summary would say of all ranks together: asked once a status, so without a row for each."""
    contributions = late = most = 0
    wait_s = total_s = 0.0
    for one in engine.run.roster.stats.values():
        contributions, late = contributions + one.contributions, late + one.staleness_sum
        most = max(most, one.staleness_max)
        wait_s, total_s = wait_s + one.wait_s, total_s + one.compute_s + one.transfer_s + one.wait_s
    found = Totals(
        wall_s=round(engine.elapsed_s(), 3), updates=engine.run.policy.version, samples=taken.samples,
        bytes=taken.num_bytes, wait_share=wait_s / total_s if total_s else 0.0,
        staleness_mean=late / contributions if contributions else 0.0, staleness_max=most,
        final=dict(engine.run.final),
    )  # fmt: skip
    if (prices := engine.config.cost).rate is not None:
        epochs = _epochs(engine, found.samples)
        found.cost = Cost.of(prices.currency, prices.rate, found.wall_s, found.wait_share, epochs)
    return found


def _epochs(engine: Engine, num_samples: int | None) -> float | None:
    epoch_samples = engine.run.contributions.epoch_samples
    return num_samples / epoch_samples if epoch_samples and num_samples is not None else None


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
    found, passed = [], _bytes(engine, engine.run.roster.stats)
    for rank, stats in sorted(engine.run.roster.stats.items()):
        here, row = engine.traffic.get(rank, Traffic()), stats.summary()
        row.lane, row.lane_reason, row.codec = here.lane, here.lane_reason, here.codec
        row.bytes_sent, row.bytes_received = passed.get(rank, (0, 0))
        row.bytes_among = engine.traffic[rank].num_among if rank in engine.traffic else 0
        found.append(row)
    return found


def _shards(engine: Engine) -> list[ShardSummary]:
    if engine.config.server.shards == 1 or not engine.model.has_weights:
        return []
    states = {0: engine.state, **engine.shard_states}
    return [ShardSummary(shard=shard, version=one.version, bytes=one.bytes) for shard, one in sorted(states.items())]
