"""One loop's position, against a model that keeps a list of all batches and what became of each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import UsageError
from paramserver.worker.training.position.data import Cursor


def cursor_of(accumulate: int = 1, prefetch: int = 0) -> Cursor:
    found = Cursor()
    found.accumulate, found.prefetch, found.has_ended = accumulate, prefetch, False
    return found


class Model:
    """Every batch that was yielded, by its number and the number of moves before; and the used ones."""

    def __init__(self) -> None:
        self.yielded: list[tuple[int, int]] = []
        self.used: list[int] = []
        self.num_gone = self.num_moves = self.at = 0

    @property
    def in_hand(self) -> list[tuple[int, int]]:
        return self.yielded[self.num_gone :]

    def step(self, num: int) -> bool:
        """Whether the step counts: none of its batches is from before the run moved."""
        taken, self.num_gone = self.in_hand[:num], self.num_gone + num
        counts = all(moves == self.num_moves for _, moves in taken)
        self.used += [number for number, _ in taken] if counts else []
        return counts


@settings(max_examples=300, deadline=None)
@given(
    accumulate=st.integers(1, 4), prefetch=st.integers(0, 3),
    events=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=40),
)  # fmt: skip
def test_a_loop_that_keeps_its_word_uses_each_batch_once_from_wherever_the_run_moves(
    accumulate: int, prefetch: int, events: list[int | None]
) -> None:
    """A loop fetches up to `prefetch` ahead and steps; at some steps the run moves to a position."""
    cursor, model, expected, num_void = cursor_of(accumulate, prefetch), Model(), 0, 0
    for event in events:
        while len(cursor.in_hand) < accumulate + prefetch:
            is_filler = cursor.num_fill > 0
            number = cursor.next
            cursor.yielded(1)
            model.yielded.append((number, -1 if is_filler else model.num_moves))
        is_void = cursor.num_void > 0
        num = cursor.due()
        assert num == accumulate
        num_samples = cursor.use(num)
        assert model.step(num) is not is_void, "a step is void as a whole, or not at all"
        assert num_samples == (0 if is_void else accumulate)
        num_void += is_void
        if not is_void:
            assert model.used[-accumulate:] == list(range(expected, expected + accumulate))
            expected += accumulate
        assert cursor.position == expected
        assert [end for _, end, _ in cursor.in_hand] == sorted(end for _, end, _ in cursor.in_hand) or cursor.num_void
        if event is not None:
            cursor.move(event)
            cursor.fill(cursor.num_void_steps)
            model.num_moves, expected = model.num_moves + 1, event
    assert num_void <= sum(event is not None for event in events) * -(-prefetch // accumulate)


@pytest.mark.parametrize(
    ("stated", "num", "problem", "fix"),
    [
        ((1, 0), 2, "step() with 2 unused batches of session.shard() (2 yielded, 0 used)", "accumulate=2 if a step"),
        ((1, 0), 2, "which says accumulate=1, prefetch=0", "prefetch=1 if the loop fetches ahead; session.skip()"),
        ((3, 1), 5, "accumulate=3, prefetch=1", "accumulate=4 if a step uses several batches; prefetch=2"),
        ((3, 0), 2, "step() with 2 unused batches", "accumulate=2), or batches.accumulate = 2 before this step"),
        ((2, 0), 0, "step() with 0 unused batches", "batches.accumulate = 0 before this step"),
    ],
)
def test_other_batches_than_were_stated_are_named_with_the_word_to_add(
    stated: tuple[int, int], num: int, problem: str, fix: str
) -> None:
    cursor = cursor_of(*stated)
    for _ in range(num):
        cursor.yielded(4)
    with pytest.raises(UsageError) as refused:
        cursor.due()
    assert problem in refused.value.message and fix in (refused.value.fix or "")


def test_the_end_of_a_pass_that_no_step_used_is_named() -> None:
    cursor = cursor_of(2)
    for number in range(1, 4):
        cursor.yielded(4, is_last=number == 1)
    with pytest.raises(UsageError, match="the oldest 1 ended the pass before"):
        cursor.due()
