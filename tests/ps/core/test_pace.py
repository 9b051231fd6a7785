"""How fast a rank trains: its live rate, and its pace between its first contribution and its newest."""

from __future__ import annotations

import pytest

from paramserver.ps.core.counting.stats import WorkerStats


def test_pace_is_between_the_first_and_the_newest() -> None:
    stats = WorkerStats(0, samples=500)  # of a snapshot
    assert stats.pace == 0.0
    stats.accepted(0, 32, 0, 7.0)  # however long it took to begin
    assert stats.pace == 0.0
    for step in range(1, 101):
        stats.accepted(0, 32 if step <= 50 else 64, 0, 7.0 + 0.1 * step)
    assert stats.pace == pytest.approx(480.0)  # 50 of 320 a tenth, then of 640
    assert stats.samples_per_s == pytest.approx(640.0)  # of the newest ones
    assert stats.summary().pace == stats.pace
    assert WorkerStats.restored(0, stats.saved(0)).pace == 0.0


def test_who_is_passed_over_makes_nobody_faster() -> None:
    """Rounds of 20 ms that close with one of two (policy.backup_workers: 1): the paces add up to a batch a round."""
    one, other = WorkerStats(0), WorkerStats(1)
    other.passed_over(0.01)
    for step in range(100):
        now = 0.02 * step
        first, second = (other, one) if step in (90, 91) else (one, other)
        first.accepted(0, 32, 0, now + 0.02)
        second.passed_over(now + 0.03)
    assert one.pace + other.pace == pytest.approx(32 / 0.02, rel=0.02)
