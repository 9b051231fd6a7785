"""The learning rates of each rank's contributions, as the process that takes the rank is told them."""

from __future__ import annotations

import json

import pytest

from paramserver.common.wire.records import RateInfo
from paramserver.ps.core.counting import Rates


def of(*rates: float) -> tuple[dict, ...]:
    return tuple({"lr": rate, "momentum": 0.9} for rate in rates)


def test_the_first_is_that_of_the_first_step_and_the_last_that_of_what_counts() -> None:
    found, loss_rates = Rates(), of(0.08, 0.8)
    assert found.of_rank.get(1) is None
    found.counted(1, loss_rates, (0.1, 1.0))  # after some local steps
    found.counted(1, loss_rates, ())  # as before: the same numbers are not sent again
    found.counted(1, of(0.06, 0.6), ())
    found.counted(1, of(0.06, 0.6), (0.1, 1.0))  # of a process that has replaced the first
    assert found.of_rank.get(1) == RateInfo((0.1, 1.0), (0.06, 0.6), 1)


def test_they_are_in_snapshots() -> None:
    found, other = Rates(), Rates()
    found.counted(0, of(0.1), (0.1,))
    found.counted(0, of(0.05), ())
    other.restore(json.loads(json.dumps(found.saved())))
    assert other.of_rank.get(0) == found.of_rank.get(0) == RateInfo((0.1,), (0.05,), 1)


@pytest.mark.parametrize(
    "saved", [None, [], {"0": None}, {"0": [[1], ["x"], 0]}, {"0": [[float("nan")], [1.0], 0]}, {"-": [[1], [1], 0]}]
)
def test_what_a_snapshot_has_that_is_no_rate_is_not_known(saved: object) -> None:
    found = Rates()
    found.restore(saved)
    assert found.of_rank.get(0) is None


def test_an_optimizer_without_a_rate_has_none() -> None:
    found = Rates()
    found.counted(0, ({"momentum": 0.9}, {"lr": None}), ())
    assert found.of_rank.get(0) == RateInfo((0.0, 0.0), (0.0, 0.0), 0)
