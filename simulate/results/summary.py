"""Results of a simulated run: a `Summary`, as of any run, and its workers' time by cause."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from rich.table import Column, Table

from ...common.reporting.metrics import OF_WORKER, values_of, with_mean_rate
from ...common.reporting.pictures import Curves
from ...common.reporting.report import share, size
from ...common.reporting.summary import Summary, WorkerStatus
from ...common.wire.json_text import to_json
from ...ps.core.counting import Traffic, WorkerSource
from ..run.simulation import Simulation
from ..run.tally import CAUSES

_LEAST_PART = 0.001  # causes that never exceed this are not drawn
# Of CAUSES.
_NAMES = ("computing", "waiting for the mode", "waiting to upload", "server's work", "server's link", "own link")
# Of `metrics`, those that only --json has: for work on the simulator, or another column has them.
_OWN_METRICS = {"steps/s", "stale p50", "stale p99", "lead max", "skew p50", "skew max", "policy us"}


def summary(simulation: Simulation, baseline: Simulation | None = None) -> Summary:
    """Returns a summary as `ps/observe/reports.py` makes it.

    It has metrics of the simulation instead of an evaluation, and the speed-up over the `baseline`.
    """
    run, policy = simulation.run, simulation.policy
    curve = [] if simulation.learner is None else list(simulation.learner.curve)
    final = dict(curve[-1].metrics) if curve else {}
    if baseline is not None:
        final["speed-up"] = baseline.now / simulation.now if simulation.now else 0.0
    elapsed_s, workers = run.contributions.elapsed_s(simulation.now, True), []
    for worker in (worker for worker in simulation.workers if worker.incarnation):  # it joined before the end
        traffic = Traffic(round(worker.num_sent), round(worker.num_received), transport="simulated")
        source = WorkerSource(worker.rank, policy, run.roster.stats[worker.rank], traffic)
        rates = with_mean_rate(values_of(OF_WORKER.values(), source), elapsed_s)
        workers.append(WorkerStatus(rank=worker.rank, transport=traffic.transport, **rates))
    steady_s, samples, steps = run.contributions.steady()
    return Summary(
        mode=simulation.config.run.mode,
        staleness_bound=policy.staleness_bound,
        local_steps=policy.local_steps,
        version=policy.version,
        wall_s=round(elapsed_s, 6),
        steady_s=round(steady_s, 6),
        steady_samples=samples,
        steady_steps=steps,
        final=final | metrics(simulation),
        better={"steps/s": "max", "of ideal": "max", "speed-up": "max"},
        curve=curve,
        workers=workers,
    )


def as_text(runs: list[tuple[str, Simulation]], baseline: Simulation | None = None) -> str:
    """Returns all runs by name, as JSON: summary, seconds of all workers by cause, staleness by versions, and the hash
    of the events."""
    found = {
        name: {
            "summary": summary(item, baseline).model_dump(),
            "seconds": item.tally.seconds,
            "staleness": dict(sorted(item.tally.staleness.items())),
            "events": item.tally.digest,
        }
        for name, item in runs
    }
    return to_json(found, indent=2)


def metrics(simulation: Simulation) -> dict[str, float]:
    """Returns the metrics of a simulation.

    `steps/s`: training steps per second of all workers. `of ideal`: the same, relative to workers that only compute.
    Staleness and skew are in versions, leads in training steps. `policy us`: microseconds of the run's rules for a
    contribution.
    """
    stats, staleness = simulation.run.roster.stats.values(), simulation.tally.staleness
    elapsed_s = simulation.run.contributions.elapsed_s(simulation.now, True)
    rate = simulation.tally.num_steps * simulation.world.behind / elapsed_s if elapsed_s else 0.0
    spent, skews = simulation.tally.decision_s, Counter(sample.skew for sample in simulation.tally.samples)
    return {
        "steps/s": rate,
        "of ideal": rate / ideal if (ideal := ideal_rate(simulation)) else 0.0,
        "stale p50": percentile(staleness, 0.5),
        "stale p99": percentile(staleness, 0.99),
        "lead max": max((stats_entry.lead_max for stats_entry in stats), default=0),
        "skew p50": percentile(skews, 0.5),
        "skew max": max(skews, default=0),
        "dropped": sum(stats_entry.dropped for stats_entry in stats),
        "policy us": 1e6 * sum(spent) / len(spent) if spent else 0.0,
    }


def for_people(runs: list[tuple[str, Summary]]) -> list[tuple[str, Summary]]:
    """Returns the summaries without the metrics that need knowledge of the simulator."""
    found = []
    for name, item in runs:
        final = {key: value for key, value in item.final.items() if key not in _OWN_METRICS}
        found.append((name, item.model_copy(update={"final": final})))
    return found


def sentence(runs: list[tuple[str, Summary]]) -> str:
    """Returns the conclusion as a sentence."""
    (name, first), *others = sorted(runs, key=lambda run: -float(run[1].final["steps/s"]))
    rate = float(first.final["steps/s"])
    text = f"Fastest is {name}: {rate:,.1f} training steps a second of all workers"
    text += f", which compute {share(float(first.final['of ideal']))} of the time"
    if not others or not rate:
        return f"{text}."
    rest = ", ".join(f"{other} {share(float(item.final['steps/s']) / rate)}" for other, item in others)
    return f"{text}. Shares of that rate: {rest}."


def ideal_rate(simulation: Simulation) -> float:
    """Returns training steps a second if workers only computed, each at its mean pace."""
    if simulation.world.ideal:
        return simulation.world.ideal
    stats, policy = simulation.run.roster.stats.items(), simulation.policy
    return sum(policy.steps_done(rank) / entry.compute_s for rank, entry in stats if entry.compute_s)


def percentile(counts: Counter[int], part: float) -> int:
    """Returns the smallest value that at least this part (0..1) of the counted values does not exceed; 0 of none."""
    values = sorted(counts.elements())
    return values[max(0, math.ceil(part * len(values)) - 1)] if values else 0


def time_table(runs: list[tuple[str, Simulation]]) -> Table:
    """Returns `time_cells` as a table."""
    head, rows = time_cells(runs)
    columns = (Column(name, justify="right") for name in head[1:])
    table = Table(Column(head[0], style="bold"), *columns, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def time_pictures(runs: list[tuple[str, Simulation]]) -> list[tuple[str, str, str, Curves]]:
    """Returns pictures of each run: parts (0..1) of its workers' time over the virtual time."""
    found: list[tuple[str, str, str, Curves]] = []
    for mode, run in runs:
        samples, curves = run.tally.samples, []
        for cause, name in zip(CAUSES, _NAMES, strict=True):
            points = [
                (after.at, (after.seconds[cause] - before.seconds[cause]) / total)
                for before, after in pairwise(samples)
                if (total := sum(after.seconds.values()) - sum(before.seconds.values())) > 0
            ]
            if len(points) > 1 and max(part for _, part in points) >= _LEAST_PART:
                curves.append((name, points))
        if curves:
            found.append((f"time-of-{mode}.png", f"{mode}: where the time of its workers went", "s", curves))
    return found


def time_cells(runs: list[tuple[str, Simulation]]) -> tuple[list[str], list[list[str]]]:
    """Returns column names and rows: the workers' time by cause, and their traffic with framing."""
    rows = []
    for mode, run in runs:
        total = sum(run.tally.seconds.values()) or 1.0
        sent, received = (sum(getattr(worker, name) for worker in run.workers) for name in ("num_sent", "num_received"))
        parts = (share(run.tally.seconds[cause] / total) for cause in CAUSES)
        rows.append([mode, *parts, size(round(sent)), size(round(received))])
    return ["mode", *_NAMES, "up", "down"], rows
