"""The commands behind what docs say about learning; what they find in full is in docs/log.md."""

from __future__ import annotations

from importlib import import_module

import pytest

from paramserver.benchmarks.claims import async_diloco, codecs, late, outer
from paramserver.benchmarks.claims.__main__ import CLAIMS, command


@pytest.mark.slow
def test_four_bits_of_a_gradient_learn_as_well_as_all() -> None:
    raw, q4 = (codecs.run(codec, "momentum", 0, 50) for codec in ("raw", "q4"))
    assert raw.accuracy > 0.7, raw
    assert abs(q4.accuracy - raw.accuracy) < 0.05, q4
    assert q4.ratio > 7.5


@pytest.mark.parametrize("number", CLAIMS)
def test_every_claim_is_a_command_that_exists(number: str) -> None:
    """With the module's own arguments, ways and codecs."""
    module = import_module(f"paramserver.benchmarks.claims.{CLAIMS[number].module}")
    options = module.arguments().parse_args(command(number, 3, 1.0)[2:])
    assert (options.seeds, options.steps) == (3, CLAIMS[number].steps)


def test_workers_of_unequal_speed_wait_for_each_other_in_rounds() -> None:
    found = outer.run("unequal", outer.make_task("digits"), 0, 26)
    assert found.seconds == 4 * 26, "the slowest's"
    assert (found.up, found.down) == (pytest.approx(13, rel=0.01), pytest.approx(13, rel=0.01)), "two rounds"
    assert 0 < found.loss < 2.3


@pytest.mark.slow
def test_nobody_waits_and_it_learns_as_much_and_momentum_with_whole_deltas_diverges() -> None:
    """Local steps learn without waiting where a delta counts as its share (arXiv:2401.09135)."""
    plain, ours = async_diloco.Run("diloco, plain mean", 0).go(400), async_diloco.Run("async_diloco", 0).go(400)
    assert ours.accuracy > plain.accuracy - 0.02 and ours.seconds < plain.seconds / 2
    assert async_diloco.Run("naive 0.7, 0.9", 0).go(400).accuracy < 0.6


@pytest.mark.slow
def test_momentum_among_late_workers_diverges_and_what_is_left_of_it_learns() -> None:
    """Late gradients are tamed by leaving less momentum (Mitliagkas et al. 2016)."""
    assert late.run("nothing", 4, 0, 400) < 0.5
    assert late.run("momentum (default)", 4, 0, 400) > 0.8
