"""Sentences of a comparison agree with the numbers in them."""

from __future__ import annotations

import pytest

from paramserver.common.reporting.comparison import findings
from paramserver.common.reporting.summary import Summary, WorkerStatus


@pytest.mark.parametrize(
    ("least_s", "least", "times"), [(0.005, "0%", ""), (0.5, "5%", ", 10.0 times as much"), (0.0, "0%", "")]
)
def test_nothing_is_a_multiple_of_what_is_written_as_zero(least_s: float, least: str, times: str) -> None:
    runs = [(name, Summary(mode=name, wall_s=1.0, workers=[WorkerStatus(rank=0, compute_s=10 - s, wait_s=s)]))
            for name, s in (("async", least_s), ("sync", 5.0))]  # fmt: skip
    waiting = f"Waiting, of the workers' time: least in async, {least}; most in sync, 50%{times}."
    assert waiting in findings(runs)
