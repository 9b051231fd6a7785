"""The claim that local steps learn without waiting where a delta counts as its share (arXiv:2401.09135), in short."""

from __future__ import annotations

import pytest

from paramserver.benchmarks.claims.async_diloco import Run


@pytest.mark.slow
def test_nobody_waits_and_it_learns_as_much_and_momentum_with_whole_deltas_diverges() -> None:
    whole, ours = Run("diloco, plain mean", 0).go(400), Run("async_diloco", 0).go(400)
    assert ours.accuracy > whole.accuracy - 0.02 and ours.seconds < whole.seconds / 2
    assert Run("naive 0.7, 0.9", 0).go(400).accuracy < 0.6
