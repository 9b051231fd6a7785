"""Makes the status of a run, for all views and the call Status, and its summary."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from ...common.reporting.curve import Point
from ...common.reporting.metrics import OF_WORKER, Value, over_workers, values_of
from ...common.reporting.status import Status, WorkerStatus, mean_recorded
from ...common.reporting.summary import Cost, ShardSummary, Summary
from ...common.runstore.ran import Ran, label_of, optimizer_settings, read_work, settings_of
from ..core.counting.sources import Traffic, WorkerSource, work_of
from ..core.run import Run
from ..engine.engine import Engine
from ..policies.shared.decisions import Outer
from ..tensors.model import Model

# The most workers in a status, so that its size does not grow with the run. The sums cover all workers, which takes
# 20 ms for 10,000.
_MOST_LISTED = 64
_NO_TRAFFIC = Traffic()


def sources(engine: Engine, ranks: Iterable[int], is_here: bool = False) -> list[WorkerSource]:
    """Return the sources of these workers' metrics. With `is_here`, without bytes exchanged with other shards."""
    policy, stats, traffic = engine.run.policy, engine.run.roster.stats, engine.traffic
    others = () if is_here else [state.traffic for state in engine.shard_states.values()]
    return [WorkerSource(rank, policy, stats[rank], traffic.get(rank, _NO_TRAFFIC), others) for rank in ranks]


def status(engine: Engine) -> Status:
    """Return the present status of the run."""
    run, now, config, others = engine.run, engine.now(), engine.config, engine.shard_states
    versions = [run.policy.version, *(state.version for state in others.values())]
    ranks = _listed(run)
    workers = _workers(engine, ranks, engine.waiting(now, ranks))
    return Status.of(
        mode=run.mode,
        evaluated=with_bytes(engine, run.curve.points[-1]) if run.curve.points else None,
        waiting=_waiting_for_all(engine, now),
        workers=workers,
        recorded=mean_recorded(workers),
        left_out=len(run.roster.stats) - len(ranks),
        versions=versions if config.server.shards > 1 else [],
        shard_bytes=[shard.lasting_bytes for shard in _shards(engine)],
        **run_metrics(engine),
    )


def run_metrics(engine: Engine) -> dict[str, Value]:
    """Return the metrics of the run: its own, and the totals over all workers."""
    workers = sources(engine, engine.run.roster.stats)
    of_run = values_of((metric for metric in Status.declared_metrics() if metric.of_run), engine)
    return over_workers(lambda metric: list(map(metric.read, workers)) if metric.read else []) | of_run


def _listed(run: Run) -> list[int]:
    """Return the ranks to list in a status, ascending. Of many ranks, these are the slowest ones."""
    policy, stats = run.policy, run.roster.stats
    if len(stats) <= _MOST_LISTED:
        return sorted(stats)
    if policy.members:
        return sorted(policy.slowest_members(_MOST_LISTED))
    return sorted(nsmallest(_MOST_LISTED, stats, key=lambda rank: policy.num_counted.get(rank, 0)))


def _workers(engine: Engine, ranks: list[int], why: dict[int, str]) -> list[WorkerStatus]:
    """Return the status of these ranks, with bytes from all shards. `why` has the reason for which each rank waits."""
    found = []
    for source in sources(engine, ranks):
        traffic, rank = source.traffic, source.rank
        metrics = values_of(OF_WORKER.values(), source)
        found.append(
            WorkerStatus.of(
                rank=rank, state=state_of(engine, rank), waiting_for=why.get(rank, ""), transport=traffic.transport,
                transport_reason=traffic.transport_reason, codec=traffic.codec, region=traffic.region,
                recorded=dict(traffic.recorded), **metrics,
            )
        )  # fmt: skip
    return found


def state_of(engine: Engine, rank: int) -> str:
    """Return the state of a rank: joining, waiting, uploading, computing, away, finished or gone."""
    worker = engine.run.roster.workers.get(rank)
    if worker is None:
        return "gone"
    peer = engine.peers.get((rank, worker.incarnation))
    return peer.state if peer is not None and not worker.is_away else "away"


def _waiting_for_all(engine: Engine, now: float) -> str:
    """Return the reason for which all workers wait, or "" if a worker may compute or the run is over."""
    run = engine.run
    if missing := engine.why_not_ready():
        return missing
    if not run.roster.workers:
        return "" if run.is_any_rank_through else "a worker to join"
    return run.policy.waiting_reason(now) if run.has_weights else "the initial weights"


def summary(engine: Engine) -> Summary:
    """Return the results so far."""
    run = engine.run
    values, final = run_metrics(engine), dict(run.final)
    if "loss" not in final and values["loss"] is not None:
        final["train_loss"] = values["loss"]
    cosine, gain = _direction(run.policy.outer, engine.model)
    steady_s, samples, steps = run.contributions.steady()
    found = Summary(
        mode=run.mode,
        cosine=cosine,
        gain=gain,
        staleness_bound=run.policy.staleness_bound,
        local_steps=run.policy.local_steps,
        wall_s=round(engine.elapsed_s(), 3),
        step_s=run.contributions.step_s,
        steady_s=round(steady_s, 6),
        steady_samples=samples,
        steady_steps=steps,
        staleness=dict(sorted(run.contributions.staleness.items())),
        ended_by=ended_by(engine),
        final=final,
        curve=[with_bytes(engine, point) for point in run.curve.points],
        best=with_bytes(engine, run.curve.best) if run.curve.best is not None else None,
        workers=_workers(engine, sorted(run.roster.stats), {}),
        shards=_shards(engine),
        **values,
    )
    found.cost = cost(engine, found.wall_s, found.wait_share, found.samples)
    return found


def ran(engine: Engine) -> Ran:
    """Return what ran: settings of the server and the mode, and what the lowest rank that has contributed says."""
    work = read_work(work_of(engine.traffic))
    run, model, config = engine.run, engine.model, engine.config
    spec = model.whole_optimizer
    policy, outer = run.policy, run.policy.outer
    options = policy.options.model_dump(mode="json")
    if outer is not None and "outer_momentum" in options:
        options["outer_momentum"] = outer.arguments.get("momentum")
    if "overlap_steps" in options:
        options["overlap_steps"] = policy.merge.after_steps
    optimizer = (
        None if spec is None else optimizer_settings(spec.name, [group.hyperparameters for group in spec.groups])
    )
    found = settings_of(config, run.mode, options, optimizer, work)
    found["run"] |= {"workers": config.run.workers or len(run.roster.stats), "parent": engine.parent}
    return Ran(label_of(work), found)


def cost(engine: Engine, elapsed_s: float, wait_share: float, samples: int | None) -> Cost | None:
    """Return the cost of the run so far, or None without prices."""
    prices, epoch_samples = engine.config.cost, engine.run.contributions.data.num_samples
    if prices.rate is None:
        return None
    epochs = samples / epoch_samples if epoch_samples and samples is not None else None
    return Cost.of(prices.currency, prices.rate, elapsed_s, wait_share, epochs)


def ended_by(engine: Engine) -> str:
    """Return the reason or error that ended the run, or "" if it took all steps or still runs."""
    run, error = engine.run, engine.error
    return run.ended_by or ("" if error is None else str(error))


def with_bytes(engine: Engine, point: Point) -> Point:
    """Return the point with its exchanged bytes, if this server process has counted them."""
    return point.model_copy(update={"num_bytes": engine.bytes_when.get(point.version, point.num_bytes)})


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
