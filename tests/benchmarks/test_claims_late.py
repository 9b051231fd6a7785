"""The claim that late gradients are tamed by leaving less momentum, in short (Mitliagkas et al. 2016)."""

from __future__ import annotations

import pytest

from paramserver.benchmarks.claims.late import run


@pytest.mark.slow
def test_momentum_among_late_workers_diverges_and_what_is_left_of_it_learns() -> None:
    assert run("nothing", 4, 0, 400) < 0.5
    assert run("momentum (default)", 4, 0, 400) > 0.8
