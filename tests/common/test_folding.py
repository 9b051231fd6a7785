"""The numbers of a run are those of its ranks: of all for what was done, of live ones for what is now."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.reporting.metrics import OF_WORKER, Fold, Metric, Presence, Tense, Value, folded, mean_recorded
from paramserver.common.reporting.summary import Status, WorkerStatus
from paramserver.ps.core.counting import WorkerStats

ADDED = [metric for metric in OF_WORKER.values() if metric.over_workers in (Fold.SUM, Fold.MEAN, Fold.MAX)]


@dataclass
class Rank:
    presence: Presence
    values: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, Any] = field(default_factory=dict)


def value(metric: Metric, rank: Rank) -> Value:
    return rank.values[metric.name]


presences = st.builds(Presence, st.booleans(), st.booleans(), st.floats(0, 100))
ranks = st.builds(
    Rank, presences, st.fixed_dictionaries({metric.name: st.integers(0, 1000).map(float) for metric in ADDED}),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 9).map(float)),
)  # fmt: skip


@given(st.lists(ranks, max_size=6), ranks)
def test_a_rank_that_is_gone_changes_what_was_done_and_nothing_of_now(others: list[Rank], gone: Rank) -> None:
    live = [rank for rank in others if rank.presence.is_live]
    gone.presence = gone.presence._replace(is_live=False)
    found, before = folded([*others, gone], value), folded(others, value)
    for metric in ADDED:
        name = metric.name
        if metric.tense is Tense.NOW or (metric.tense is Tense.LAST and live):
            assert found[name] == before[name]
        elif metric.over_workers is Fold.SUM and metric.tense is Tense.DONE:
            assert found[name] == before[name] + gone.values[name]
    if live:
        assert mean_recorded([*others, gone]) == mean_recorded(others) == mean_recorded(live)


@given(st.lists(ranks, min_size=1, max_size=6))
def test_where_nobody_is_live_what_was_seen_last_is_of_those_that_were_last(some: list[Rank]) -> None:
    for rank in some:
        rank.presence = rank.presence._replace(is_live=False)
    found = folded(some, value)
    left_well = [rank for rank in some if not rank.presence.is_lost]
    newest = max(rank.presence.last_at for rank in some)
    last = left_well or [rank for rank in some if rank.presence.last_at == newest]
    assert found["loss"] == pytest.approx(sum(rank.values["loss"] for rank in last) / len(last))
    assert (found["samples_per_s"], found["cpu"]) == (0, None)


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 64)), min_size=2, max_size=50), st.floats(0, 1000))
def test_a_rate_is_the_samples_of_the_time_until_now_and_decays(steps: list[tuple[float, int]], idle_s: float) -> None:
    stats, now, times = WorkerStats(0), 3.0, []
    for after_s, samples in steps:
        now += after_s
        stats.accepted(0, samples, 0, now)
        times.append((now, samples))
    recent = times[-20:]
    samples = sum(count for _, count in recent[1:])
    assert stats.samples_per_s(now + idle_s) == pytest.approx(samples / (now + idle_s - recent[0][0]))
    assert stats.samples_per_s(now + idle_s + 1) < stats.samples_per_s(now + idle_s)


def test_a_new_process_of_a_rank_begins_its_rate_anew() -> None:
    stats = WorkerStats(0)
    for step in range(30):
        stats.accepted(0, 10, 0, 0.1 * step)
    stats.joined_anew(100.0)
    assert stats.samples_per_s(100.5) == 0.0
    for step in range(3):
        stats.accepted(0, 10, 0, 101.0 + 0.5 * step)
    assert stats.samples_per_s(102.0) == pytest.approx(20.0)


@given(
    st.lists(st.tuples(*[st.floats(0, 3)] * 3), min_size=1, max_size=30), st.floats(0, 100), st.booleans()
)  # computing, transfer and waiting of each contribution
def test_the_shares_are_of_one_interval_whose_end_is_now(
    steps: list[tuple[float, float, float]], open_s: float, is_waiting: bool
) -> None:
    """A worker that goes from computing to transfer to waiting, and is in its last state for `open_s`."""
    stats, now, begins = WorkerStats(0), 0.0, []
    for at, (compute_s, transfer_s, wait_s) in enumerate(steps):
        now += compute_s + transfer_s
        stats.compute_s += compute_s
        stats.transfer_s += transfer_s
        stats.accepted(0, 1, 0, now)
        begins.append(now)
        if not is_waiting or at + 1 < len(steps):
            now += wait_s
            stats.wait_s += wait_s
    found = stats.recent_s(now + open_s, now if is_waiting else None)
    assert sum(found) == pytest.approx(now + open_s - begins[-20:][0], abs=1e-6)
    assert found[2 if is_waiting else 0] >= open_s - 1e-9


def test_records_fold_as_sources_do() -> None:
    """The launcher and `ps-runs` fold what a server without a sum has sent."""
    workers = [
        WorkerStatus(rank=0, state="computing", loss=0.42, samples_per_s=10.0, samples=100, cpu=0.5),
        WorkerStatus(rank=1, state="gone", loss=1.36, samples_per_s=6000.0, samples=40, cpu=1.0),
        WorkerStatus(rank=2, state="finished", loss=9.0, samples_per_s=99.0, samples=2, cpu=1.0),
    ]
    status = Status(workers=workers)
    assert (status.loss, status.samples_per_s, status.cpu, status.samples) == (0.42, 10.0, 0.5, 142)
    assert math.isfinite(status.wait_share)


def test_the_rate_of_unknown_samples_is_unknown_also_where_nobody_is_live() -> None:
    gone = WorkerStatus(rank=0, state="finished", samples=None)
    assert (gone.samples_per_s, Status(workers=[gone]).samples_per_s) == (None, None)
    known = WorkerStatus(rank=1, state="computing", samples=8, samples_per_s=4.0)
    assert Status(workers=[gone, known]).samples_per_s == 4.0
    assert WorkerStatus(rank=1, state="finished", samples=8).samples_per_s == 0
