"""Makes the status of a run, for all views and the call Status, and its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import Any

from ...common.reporting.metrics import (
    OF_WORKER,
    Tense,
    Value,
    folded,
    mean_recorded,
    part_of_time,
    values_of,
    with_mean_rate,
)
from ...common.reporting.summary import Cost, ShardSummary, Status, Summary, WorkerStatus
from ...common.runstore.record import Ran, read_work, what_ran
from ...common.wire.records import NO_ROW
from ..core.counting import Traffic, WorkerSource, work_of
from ..core.run import Run
from ..engine.engine import Engine
from ..policies.shared.decisions import Outer
from ..tensors.model import Model

# The most workers in a status, so that its size does not grow with the run. The sums cover all workers, which takes
# 20 ms for 10,000.
_MOST_LISTED = 64
_NO_TRAFFIC = Traffic()


def sources(engine: Engine, ranks: Iterable[int], is_here: bool = False) -> list[WorkerSource]:
    """Return the sources of these workers' metrics, all of one moment. `is_here`: without bytes of other shards."""
    policy, roster, traffic, now = engine.run.policy, engine.run.roster, engine.traffic, engine.now()
    others = () if is_here else [state.traffic for state in engine.shard_states.values()]
    found = []
    for rank in ranks:
        worker = roster.workers.get(rank)
        is_live = worker is not None and not worker.is_finished
        since = worker.waiting_since if worker is not None and is_live else None
        stats = roster.stats[rank]
        found.append(WorkerSource(rank, policy, stats, traffic.get(rank, _NO_TRAFFIC), others, now, is_live, since))
    return found


def status(engine: Engine) -> Status:
    """Return the present status of the run."""
    run, now, config, others = engine.run, engine.now(), engine.config, engine.shard_states
    versions = [run.policy.version, *(state.version for state in others.values())]
    ranks, of_all = _listed(run), sources(engine, run.roster.stats)
    of_rank = {source.rank: source for source in of_all} if ranks else {}
    why = engine.waiting(now, ranks)
    return Status.of(
        mode=run.mode,
        evaluated=run.curve.points[-1] if run.curve.points else None,
        waiting=_waiting_for_all(engine, now),
        workers=[_now(engine, of_rank[rank], why.get(rank, "")) for rank in ranks],
        recorded=mean_recorded(of_all),
        left_out=len(run.roster.stats) - len(ranks),
        versions=versions if config.server.shards > 1 else [],
        shard_bytes=[shard.lasting_bytes for shard in _shards(engine)],
        **_of_run(engine, of_all),
    )


def _of_run(engine: Engine, workers: list[WorkerSource]) -> dict[str, Value]:
    """Return the metrics of the run: its own, and those that add up over its workers."""
    of_run = values_of((metric for metric in Status.declared_metrics() if metric.of_run), engine)
    return folded(workers, lambda metric, worker: metric.read(worker) if metric.read else None) | of_run


def _listed(run: Run) -> list[int]:
    """Return the ranks to list in a status, ascending. Of many ranks, these are the slowest ones."""
    rows, stats = run.policy.rows, run.roster.stats
    if len(stats) <= _MOST_LISTED:
        return sorted(stats)
    # Within a round, these are the live ranks that it waits for.
    ranks = run.policy.members or stats
    return sorted(nsmallest(_MOST_LISTED, ranks, key=lambda rank: rows.get(rank, NO_ROW).steps))


def _now(engine: Engine, source: WorkerSource, why: str) -> WorkerStatus:
    """Return the status of a rank, with the seconds for which it has computed or waited. `why`: the reason to wait."""
    state_s = source.stats.computes_s(source.now) if state_of(engine, source.rank) == "computing" else 0.0
    if source.is_live and source.waiting_since is not None:
        state_s = source.now - source.waiting_since
    metrics = values_of(OF_WORKER.values(), source)
    return _worker(engine, source, {**metrics, "state_s": round(state_s, 3), "waiting_for": why})


def _worker(engine: Engine, source: WorkerSource, values: Mapping[str, Any]) -> WorkerStatus:
    traffic = source.traffic
    return WorkerStatus.of(
        rank=source.rank, state=state_of(engine, source.rank), transport=traffic.transport,
        transport_reason=traffic.transport_reason, codec=traffic.codec, region=traffic.region,
        recorded=dict(traffic.recorded), **values,
    )  # fmt: skip


def state_of(engine: Engine, rank: int) -> str:
    """Return the state of a rank: joining, waiting, uploading, computing, away, finished or gone."""
    worker = engine.run.roster.workers.get(rank)
    if worker is None or worker.is_finished:
        return "gone" if worker is None else "finished"
    peer = engine.peers.get((rank, worker.incarnation))
    return peer.state if peer is not None and not worker.is_away else "away"


def _waiting_for_all(engine: Engine, now: float) -> str:
    """Return the reason for which all workers wait, or "" if a worker may compute or the run is over."""
    run = engine.run
    if missing := engine.why_not_ready():
        return missing
    if not run.roster.workers:
        return "" if any(map(run.policy.is_through, run.policy.rows)) else "a worker to join"
    if run.has_weights:
        return run.policy.waiting_reason(now)
    is_known = run.initializer is not None or 0 in run.roster.workers or not run.policy.common.num_workers
    return "the initial weights" if is_known else "rank 0, which brings the initial weights"


def summary(engine: Engine) -> Summary:
    """Return the results so far."""
    run, wall_s, workers = engine.run, round(engine.elapsed_s(), 3), sources(engine, sorted(engine.run.roster.stats))
    values, final = _of_run(engine, workers), dict(run.final)
    if "loss" not in final and values["loss"] is not None:
        final["train_loss"] = values["loss"]
    cosine, gain = _direction(run.policy.outer, engine.model)
    steady_s, samples, steps = run.contributions.steady()
    done = [metric for metric in OF_WORKER.values() if metric.tense is not Tense.NOW]
    found = Summary(
        mode=run.mode,
        cosine=cosine,
        gain=gain,
        staleness_bound=run.policy.staleness_bound,
        local_steps=run.policy.local_steps,
        wall_s=wall_s,
        step_s=run.contributions.step_s,
        steady_s=round(steady_s, 6),
        steady_samples=samples,
        steady_steps=steps,
        staleness=dict(sorted(run.contributions.staleness.items())),
        ended_by=run.ended_by or ("" if engine.error is None else str(engine.error)),
        final=final,
        curve=list(run.curve.points),
        best=run.curve.best,
        workers=[_worker(engine, source, with_mean_rate(values_of(done, source), wall_s)) for source in workers],
        shards=_shards(engine),
        **values,
    )
    found.cost = cost(engine, found)
    return found


def ran(engine: Engine) -> Ran:
    """Return what ran: settings of the server and the mode, and what the lowest rank that has contributed says."""
    run, model, config = engine.run, engine.model, engine.config
    policy, outer = run.policy, run.policy.outer
    options = policy.options.model_dump(mode="json")
    if outer is not None and "outer_momentum" in options:
        options["outer_momentum"] = outer.arguments.get("momentum")
    if "overlap_steps" in options:
        options["overlap_steps"] = policy.overlap_steps
    optimizer = model.whole_optimizer if model.has_model else None
    found = what_ran(config, run.mode, options, optimizer, read_work(work_of(engine.traffic)))
    found.settings["run"] |= {"workers": config.run.workers or len(run.roster.stats), "parent": engine.parent}
    return found


def cost(engine: Engine, found: Status | Summary) -> Cost | None:
    """Return the cost of the run so far, or None without prices."""
    elapsed_s, samples = found.wall_s if isinstance(found, Summary) else found.elapsed_s, found.samples
    epoch_samples = engine.run.contributions.data.num_samples
    epochs = samples / epoch_samples if epoch_samples and samples is not None else None
    return Cost.of(engine.config.cost, elapsed_s, part_of_time(found.row(), "wait_s") or 0.0, epochs)


def _direction(outer: Outer | None, model: Model) -> tuple[float | None, float | None]:
    """Return the cosine rho between successive means, and the gain 1 + mu / (1 - mu rho) of outer momentum mu."""
    direction = model.store.direction if model.has_weights else None
    if outer is None or direction is None or (cosine := direction.cosine) is None:
        return None, None
    momentum = float(outer.arguments.get("momentum", 0.0))
    return cosine, 1 + momentum / (1 - momentum * cosine)


def _shards(engine: Engine) -> list[ShardSummary]:
    if engine.config.server.shards == 1 or not engine.model.has_weights:
        return []
    states = {0: engine.state, **engine.shard_states}
    return [ShardSummary(shard=shard, version=item.version, bytes=item.bytes) for shard, item in sorted(states.items())]
