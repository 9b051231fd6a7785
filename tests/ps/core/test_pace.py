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
