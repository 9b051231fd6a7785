"""How fast a run trains: the live rate of a rank, and what a training step of all takes."""

from __future__ import annotations

import pytest

from paramserver.ps.core import events
from paramserver.ps.core.counting.stats import WorkerStats
from paramserver.ps.core.run import Options, Run
from paramserver.ps.engine.modes import policy_of


def test_the_live_rate_is_of_the_newest_contributions() -> None:
    stats = WorkerStats(0, samples=500)  # of a snapshot
    stats.accepted(0, 32, 0, 7.0)  # however long it took to begin
    assert stats.samples_per_s == 0.0
    for step in range(1, 101):
        stats.accepted(0, 32 if step <= 50 else 64, 0, 7.0 + 0.1 * step)
    assert stats.samples_per_s == pytest.approx(640.0)


def started(mode: str, steps: int, **options: object) -> Run:
    told = {"training_steps": steps, "num_workers": 2, **options}
    run = Run(Options(mode=mode, num_workers=2), policy_of(mode, told), "run")
    for rank in range(2):
        run.apply(events.Joined(rank + 1, rank, process=f"w{rank}"))
        run.apply(events.Offered(rank, 1, "model", "sgd"))
    run.apply(events.Brought(0, 1))
    return run


def test_a_step_takes_what_the_run_takes_whoever_closes_its_rounds() -> None:
    """With a backup worker: rank 0 closes the first half of the rounds, rank 1 the second, what the other sends is
    dropped."""
    run = started("sync", 60, backup_workers=1)
    counted = [0, 0]
    for version in range(60):
        first = 0 if version < 30 else 1
        for rank, at in ((first, 5.0 + 0.02 * version), (1 - first, 5.001 + 0.02 * version)):
            run.apply(events.Contributed(rank, 1, counted[rank] + 1, version, at=at, num_samples=32))
        counted[first] += 1
    assert run.policy.min_steps_done == 60 and [run.roster.stats[rank].dropped for rank in range(2)] == [30, 30]
    assert run.contributions.step_s == pytest.approx(0.02)


def test_the_first_step_of_the_last_to_begin_is_not_in_it_and_the_slowest_counts() -> None:
    run = started("async", 11)
    for number in range(1, 12):
        run.apply(events.Contributed(0, 1, number, run.policy.version, at=1.0 + 0.01 * number))
    assert run.contributions.step_s == 0.0, "rank 1 has taken none yet"
    for number in range(1, 12):
        run.apply(events.Contributed(1, 1, number, run.policy.version, at=9.0 + 0.05 * number))
    assert run.contributions.step_s == pytest.approx(0.05)
    assert run.contributions.staleness == {0: 22}, "of what each had built on, which was the newest"
