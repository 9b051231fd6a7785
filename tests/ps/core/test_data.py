"""What the first contributions of ranks say of their data."""

from __future__ import annotations

from paramserver.common.errors import Reason
from paramserver.ps.core.counting import Data


def test_the_same_result_from_the_same_weights_is_said_once() -> None:
    data = Data()
    assert not list(data.record(0, 0, 5))
    assert not list(data.record(0, 0, 5)), "its own again"
    assert not list(data.record(1, 0, 6))
    assert not list(data.record(2, 0, 0)), "not known"
    (problem,) = data.record(2, 0, 5)
    assert (problem.event, problem.fields["ranks"]) == ("same_batches", [0, 2])
    assert data.twins == {0: 2, 2: 0}
    assert not list(data.record(3, 0, 5)) and data.twins[3] == 0, "the server has said it; the worker has not heard"
    assert not list(Data().record(1, 4, 5))


def test_ranks_that_began_with_other_weights_in_between_are_compared_too() -> None:
    data = Data()
    assert not list(data.record(0, 0, 5))
    assert not list(data.record(1, 3, 7))
    assert not list(data.record(1, 3, 7)), "its own again"
    assert [item.event for item in data.record(2, 0, 5)] == ["same_batches"]


def test_what_a_rank_began_with_before_is_forgotten() -> None:
    """Its process was replaced, and the new one has other batches."""
    data = Data()
    assert not list(data.record(0, 0, 5))
    assert not list(data.record(0, 4, 6))
    assert not list(data.record(1, 0, 5))


def test_a_data_set_of_another_length_is_refused_with_both_numbers_and_what_to_write() -> None:
    data = Data()
    assert data.differs(0, 1000) is None and data.differs(1, 1000) is None
    assert data.differs(2, 0) is None, "it has a loader of its own"
    error = data.differs(3, 900)
    assert error is not None and error.reason is Reason.RUN_MISMATCH
    assert "rank 3" in error.message and "900 samples" in error.message and "1,000" in error.message
    assert "worker.accept_other_data" in (error.fix or "")
    assert data.num_samples == 1000
