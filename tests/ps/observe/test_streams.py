"""What the page says a worker's time went to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paramserver.ps.observe.sinks import Timeline


def taken(rank: int, exchange_s: float, transfer_s: float, compute_s: float) -> Any:
    timing = SimpleNamespace(transfer_s=transfer_s, compute_s=compute_s)
    return SimpleNamespace(
        contribution=SimpleNamespace(id=SimpleNamespace(rank=rank), timing=timing), exchange_s=exchange_s
    )


def parts(span: Any) -> tuple[float, ...]:
    return span.rank, span.begin_s, span.wait_s, span.transfer_s, span.compute_s


def test_the_time_between_two_contributions_is_waiting_transfer_and_computing() -> None:
    timeline = Timeline()
    timeline.add(1.0, taken(3, -1.0, 0.0, 0.4))  # the first of a process: there was no exchange before it
    timeline.add(2.0, taken(3, 0.6, 0.25, 0.4))
    assert [parts(item) for item in timeline.taken()] == [(3, 0.6, 0.0, 0.0, 0.4), (3, 1.0, 0.35, 0.25, 0.4)]
    assert timeline.taken() == []


def test_what_went_on_side_by_side_has_a_share_each() -> None:
    timeline = Timeline()
    timeline.add(1.0, taken(0, -1.0, 0.0, 0.5))
    timeline.add(2.0, taken(0, 1.0, 0.5, 1.0))  # two seconds' worth in one
    assert parts(timeline.taken()[1]) == (0, 1.0, 0.25, 0.25, 0.5)


def test_of_many_between_two_looks_the_sums_are_kept() -> None:
    timeline = Timeline()
    for number in range(100):
        timeline.add(0.1 * (number + 1), taken(0, 0.06 if number else -1.0, 0.02, 0.04))
        timeline.add(0.1 * (number + 1), taken(1, -1.0, 0.0, 0.1))
    found = timeline.taken()
    assert [item.rank for item in found].count(0) == [item.rank for item in found].count(1) == 4
    sums = [sum(values) for values in zip(*(parts(item)[2:] for item in found if item.rank == 0), strict=True)]
    assert sums == pytest.approx([99 * 0.04, 99 * 0.02, 100 * 0.04])
