"""One row for each rank: as counted, and as committed. Nothing else in a run holds a count of a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from paramserver.common.wire.records import Row
from paramserver.ps.core import effects, events
from paramserver.ps.core.run import Run

from ...records import contributed
from .runs import started

MODES = ("sync", "async", "ssp", "buffered", "localsgd", "async_diloco", "allreduce")
STEPS, SAMPLES, BATCHES = 977, 600_011, 3_001  # of one contribution: numbers that nothing else has
NUM = 3  # contributions of each rank


def begun(mode: str, num_workers: int = 2, **options: Any) -> Run:
    return started(mode, None, num_workers, local_steps=STEPS, buffer=2, **options)


def places(item: Any, number: int, path: str, seen: set[int]) -> Iterator[str]:
    """Where a number is, below an object."""
    if type(item) is int:
        if item == number:
            yield path
        return
    if id(item) in seen or isinstance(item, str | float | deque | type) or callable(item):
        return
    seen.add(id(item))
    if isinstance(item, Row):  # equal rows may be one object, in two tables
        seen.discard(id(item))
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from places(value, number, f"{path}[{key!r}]", seen)
    elif isinstance(item, list | tuple | set | frozenset):
        for index, value in enumerate(item):
            yield from places(value, number, f"{path}[{index}]", seen)
    else:
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*getattr(item, "__dict__", {}), *slots):
            yield from places(getattr(item, name, None), number, f"{path}.{name}", seen)


@pytest.mark.parametrize("mode", MODES)
def test_two_places_hold_what_counts_of_a_rank(mode: str) -> None:
    run, is_local = begun(mode), mode in ("localsgd", "async_diloco")
    num_steps = [STEPS, STEPS - 6] if is_local else [1, 1]
    for number in range(1, NUM + 1):
        for rank in range(2):
            event = contributed(
                rank, 1, number, run.policy.version, at=float(number), num_samples=SAMPLES + rank,
                num_steps=num_steps[rank], num_batches=BATCHES + rank,
            )  # fmt: skip
            run.apply(event)
    assert run.policy.rows == run.policy.committed
    assert run.policy.rows[1] == Row(NUM, NUM * num_steps[1], NUM * (SAMPLES + 1), NUM * (BATCHES + 1))
    counts = {"samples": NUM * (SAMPLES + 1), "batches": NUM * (BATCHES + 1)}
    if is_local:
        counts["steps"] = NUM * num_steps[1]
    for name, number in counts.items():
        found = [path for path in places(run, number, "run", set()) if "_standing" not in path and "recent" not in path]
        assert found == [f"run.policy.rows[1][{Row._fields.index(name)}]",
                         f"run.policy.committed[1][{Row._fields.index(name)}]"], name  # fmt: skip


def test_ranks_with_other_hyperparameters_at_the_same_step_are_refused_by_name() -> None:
    run = begun("sync")

    def contribute(rank: int, number: int, lr: float, iteration: int) -> list[effects.Refuse]:
        groups = ({"lr": 0.1, "momentum": 0.9}, {"lr": lr, "momentum": 0.9})
        found = run.apply(contributed(rank, 1, number, run.policy.version, hyperparameters=groups, iteration=iteration))
        return [effect for effect in found if isinstance(effect, effects.Refuse)]

    assert not contribute(0, 1, 0.1, 1) and not contribute(1, 1, 0.1, 1)
    assert not contribute(0, 2, 0.05, 2)
    (refused,) = contribute(1, 2, 0.1, 2)
    assert refused.rank == 1 and refused.error.message == (
        "rank 1 has lr 0.1 of parameter group 1 and rank 0 has 0.05, at the same training step: one step is made of "
        "the contributions of both"
    )


@pytest.mark.parametrize("mode", ["sync", "buffered"])
def test_equal_schedules_of_processes_at_other_steps_of_their_own_are_no_fault(mode: str) -> None:
    """Rank 1 is the second process of its rank, or its scaler has skipped a step."""
    run = begun(mode)
    for rank, lr, iteration in ((0, 0.05, 12), (1, 0.1, 1)):
        event = contributed(rank, 1, 1, run.policy.version, hyperparameters=({"lr": lr},), iteration=iteration)
        found = run.apply(event)
    (commit,) = [effect for effect in found if isinstance(effect, effects.Commit)]
    assert commit.hyperparameters == ({"lr": 0.05},), "the schedule that is farther"


def test_schedules_are_compared_with_what_counts_and_up_to_roundings() -> None:
    run = begun("sync", num_workers=3)

    def contribute(rank: int, lr: float, base: int = 0, iteration: int = 1) -> list[effects.Effect]:
        return run.apply(contributed(rank, 1, 1, base, hyperparameters=({"lr": lr},), iteration=iteration))

    assert not any(isinstance(effect, effects.Refuse) for effect in contribute(0, 0.1))
    assert not any(isinstance(effect, effects.Refuse) for effect in contribute(1, 0.1 * (1 + 1e-13)))
    found = contribute(2, 0.2, iteration=9)
    (commit,) = [effect for effect in found if isinstance(effect, effects.Commit)]
    (log,) = [effect for effect in found if isinstance(effect, effects.Log) and effect.event == "schedules_differ"]
    assert (commit.hyperparameters, commit.iteration, log.fields["ranks"]) == (({"lr": 0.2},), 9, [0, 1])


def test_a_contribution_that_did_not_count_is_compared_with_nothing() -> None:
    """Its round was over: the schedule of its process says nothing about the next round."""
    run = begun("sync", straggler_timeout_s=1.0)
    run.apply(contributed(0, 1, 1, 0, at=1.0, hyperparameters=({"lr": 0.1},), iteration=1))
    run.apply(events.Ticked(at=3.0))
    assert run.policy.version == 1
    dropped = run.apply(contributed(1, 1, 1, 0, at=3.5, hyperparameters=({"lr": 0.1},), iteration=1))
    assert [effect.outcome for effect in dropped if isinstance(effect, effects.ContributionTaken)] == ["dropped"]
    found = run.apply(contributed(0, 1, 2, 1, at=4.0, hyperparameters=({"lr": 0.05},), iteration=2))
    assert not any(isinstance(effect, effects.Refuse) for effect in found)


def test_a_mode_whose_workers_step_by_themselves_compares_nothing() -> None:
    run = begun("localsgd")
    for rank, lr in ((0, 0.1), (1, 0.5)):
        event = contributed(rank, 1, 1, 0, num_steps=STEPS, hyperparameters=({"lr": lr},), iteration=1)
        assert not any(isinstance(effect, effects.Refuse) for effect in run.apply(event))
    assert run.policy.version == 1


def test_a_rank_that_missed_a_round_goes_on_after_as_many_of_its_own_batches() -> None:
    """It has used other batches than the others before, and a rank that has finished is nowhere else."""
    run = begun("sync", num_workers=3, straggler_timeout_s=1.0)
    for rank, num_batches in ((0, 2), (1, 2), (2, 7)):
        run.apply(contributed(rank, 1, 1, 0, at=1.0, num_batches=num_batches))
    run.apply(events.Finished(2, 1, at=1.5))
    run.apply(contributed(0, 1, 2, 1, at=2.0, num_batches=3))
    run.apply(events.Ticked(at=4.0))
    rows = run.policy.committed
    assert run.policy.version == 2
    assert [(rows[rank].steps, rows[rank].batches) for rank in range(3)] == [(2, 5), (2, 5), (1, 7)]
