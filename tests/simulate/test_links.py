"""The shared link: closed forms, and what holds of any transfers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.simulate.machines.links import Link


def all_ends(link: Link[int], begins: list[tuple[float, float, float]]) -> dict[int, float]:
    """When each of these (time, bytes, limit) ends."""
    ends: dict[int, float] = {}
    waiting = sorted(enumerate(begins), key=lambda begin: begin[1][0], reverse=True)
    while waiting or math.isfinite(link.next_end):
        if waiting and waiting[-1][1][0] <= link.next_end:
            key, (at, num_bytes, limit) = waiting.pop()
            link.begin(at, key, num_bytes, limit)
        else:
            at = link.next_end
            ends[link.end()] = at
    return ends


def test_one_takes_its_bytes_over_its_rate() -> None:
    assert all_ends(Link(100.0), [(2.0, 50.0, 10.0)]) == {0: 7.0}
    assert all_ends(Link(10.0), [(2.0, 50.0, math.inf)]) == {0: 7.0}


@pytest.mark.parametrize("num", [2, 7, 64])
def test_n_payloads_at_once_take_n_times_as_long(num: int) -> None:
    ends = all_ends(Link(10.0), [(0.0, 50.0, math.inf)] * num)
    assert all(end == pytest.approx(5.0 * num, rel=1e-12) for end in ends.values())


def test_who_is_slow_leaves_the_rest_to_the_others() -> None:
    """10 bytes/s: one takes 2 of them, the two others 4 each; when the first is through they have 4.5 and 4.5, and so
    on."""
    ends = all_ends(Link(10.0), [(0.0, 4.0, 2.0), (0.0, 8.0, math.inf), (0.0, 18.0, math.inf)])
    assert ends == pytest.approx({0: 2.0, 1: 2.0, 2: 3.0})


def test_one_that_comes_later_takes_its_part_from_then_on() -> None:
    assert all_ends(Link(10.0), [(0.0, 20.0, math.inf), (1.0, 5.0, math.inf)]) == pytest.approx({0: 2.5, 1: 2.0})


BEGINS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(1, 100), st.sampled_from([1.0, 3.0, 50.0, math.inf])), min_size=1, max_size=12
)


@settings(max_examples=25)
@given(BEGINS, st.sampled_from([2.0, 10.0, 1000.0]))
def test_nobody_is_faster_than_its_end_nor_all_than_the_link(
    begins: list[tuple[float, float, float]], capacity: float
) -> None:
    ends = all_ends(Link(capacity), begins)
    assert sorted(ends) == list(range(len(begins)))
    for key, (at, num_bytes, limit) in enumerate(begins):
        assert ends[key] >= at + num_bytes / min(limit, capacity) - 1e-6
    total = sum(num_bytes for _, num_bytes, _ in begins)
    assert max(ends.values()) >= min(at for at, _, _ in begins) + total / capacity - 1e-6
