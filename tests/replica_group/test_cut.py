"""How layers are cut into stages: the best cut of all."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.worker.replica_group.cut import Costs, Stage, bubble, cut


def cost_of(costs: Costs, stages: list[Stage], counts: list[int]) -> float:
    """Of the slowest stage; infinite beyond a limit."""
    worst, first = 0.0, 0
    for stage, count in zip(stages, counts, strict=True):
        end = first + count
        num_bytes = sum(costs.kept_bytes[first:end]) + stage.in_flight * sum(costs.batch_bytes[first:end])
        worst = max(worst, sum(costs.seconds[first:end]) / stage.speed if num_bytes <= stage.limit else float("inf"))
        first = end
    return worst


numbers = st.integers(1, 20).map(float)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=10), st.integers(1, 4), st.data())
def test_no_other_cut_is_better(layers: list[tuple[float, float, float]], num: int, draw: st.DataObject) -> None:
    costs = Costs(*zip(*layers, strict=True))
    stages = [
        Stage(
            draw.draw(st.sampled_from([0.5, 1.0, 2.0])), draw.draw(st.integers(1, 4)), draw.draw(st.integers(20, 400))
        )
        for _ in range(num)
    ]
    found = cut(costs, stages)
    ends = ([0, *inner, len(layers)] for inner in combinations(range(1, len(layers)), num - 1))
    every = [[end - begin for begin, end in pairwise(item)] for item in ends]
    best = min((cost_of(costs, stages, counts) for counts in every), default=float("inf"))
    if found is None:
        assert best == float("inf")
    else:
        assert cost_of(costs, stages, found) == pytest.approx(best)


def test_a_bubble_is_smaller_with_more_microbatches_and_more_chunks() -> None:
    assert bubble(2, 1) == 0.5
    assert bubble(4, 9) == pytest.approx(0.25)
    assert bubble(4, 9, chunks=2) == pytest.approx(1.5 / 10.5)
    assert bubble(1, 4) == 0.0
