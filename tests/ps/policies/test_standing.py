"""Who is slowest is known without looking through everybody, and is who one would find by looking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserver.ps.policies.shared.decisions import Standing


@given(moves=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.booleans()), max_size=60))
def test_the_slowest_are_those_with_the_least_number(moves: list[tuple[int, int, bool]]) -> None:
    standing, numbers = Standing[int](), dict[int, int]()
    for rank, number, stays in moves:
        if rank not in numbers or stays:
            if rank in numbers:
                standing.move(rank, numbers[rank], number)
            else:
                standing.add(rank, number)
            numbers[rank] = number
        else:
            standing.remove(rank, numbers.pop(rank))
    least = min(numbers.values(), default=None)
    assert standing.least == least
    assert sorted(standing.slowest_ranks) == sorted(rank for rank, number in numbers.items() if number == least)
    assert all(standing.count(number) == list(numbers.values()).count(number) for number in range(7))
