"""What a run costs, from its summary."""

from __future__ import annotations

import pytest

from paramserver.common.config.schema import CostConfig
from paramserver.common.reporting.comparison import comparison_cells
from paramserver.common.reporting.summary import Cost, Summary, WorkerStatus, price

PRICES = CostConfig(total_per_hour=2.0, currency="EUR")


def summary() -> Summary:
    """Half an hour, in which two workers waited a quarter of their time, and saw 3 epochs of 1,000 samples."""
    each = {"compute_s": 900.0, "transfer_s": 450.0, "wait_s": 450.0, "samples": 1500}
    return Summary(mode="sync", wall_s=1800.0, workers=[WorkerStatus(rank=rank, **each) for rank in range(2)])


def test_what_half_an_hour_costs() -> None:
    run = summary()
    cost = Cost.of(PRICES, run.wall_s, run.wait_share, run.samples / 1000)
    assert cost is not None and (cost.total, cost.waiting) == (1.0, 0.25)
    assert cost.per_epoch == pytest.approx(1 / 3)
    assert str(cost) == "1.00 EUR, 0.33 an epoch; 0.25 for waiting"
    free = Cost.of(PRICES, 0.0, 0.0, 0.0)
    assert free is not None and (free.total, free.per_epoch) == (0.0, None)


@pytest.mark.parametrize(("amount", "text"), [(0.0, "0.00"), (1234.5, "1,234.50"), (0.1, "0.10"), (0.00123, "0.0012")])
def test_prices_are_read_by_people(amount: float, text: str) -> None:
    assert price(amount) == text


def test_a_comparison_has_prices_where_there_are_some() -> None:
    priced = summary()
    priced.cost = Cost.of(PRICES, priced.wall_s, priced.wait_share)
    head, rows = comparison_cells([("sync", priced), ("async", summary())])
    assert head[-2:] == ["cost", "for waiting"]
    assert [row[-2:] for row in rows] == [["1.00 EUR", "0.25"], ["-", "-"]]
    assert "cost" not in comparison_cells([("sync", summary())])[0]
