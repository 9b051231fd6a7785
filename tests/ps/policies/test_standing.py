"""Who is slowest is known without looking through everybody, and is who one would find by looking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserver.ps.policies.shared.standing import Standing


@given(
    moves=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.booleans()), max_size=60), most=st.integers(0, 12)
)
def test_the_slowest_are_those_with_the_least_numbers(moves: list[tuple[int, int, bool]], most: int) -> None:
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
    found = standing.first(most)
    assert len(set(found)) == len(found) == min(most, len(numbers))
    assert [numbers[rank] for rank in found] == sorted(numbers.values())[:most]
    assert standing.least == min(numbers.values(), default=None)
    assert all(standing.count(number) == list(numbers.values()).count(number) for number in range(7))
