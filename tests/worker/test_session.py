"""The worker's place in the run, and when it tries again: bounded, spread, and given up with a reason."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.errors import UnreachableError
from paramserver.common.wire.records import Position
from paramserver.worker.conversation.messages import join_message
from paramserver.worker.session import Progress, Retry

from ..records import reply_of

# ---- retry ----------------------------------------------------------------------------------------


def delays(retry: Retry, count: int, start: float = 100.0) -> list[float]:
    """The delays of `count` failures in a row, each attempt made exactly when it is due."""
    now, found = start, []
    for _ in range(count):
        found.append(retry.failed(now, "refused"))
        now += found[-1]
    return found


def test_delays_double_and_stay_near_a_quarter_of_a_second() -> None:
    assert delays(Retry("a:1", 60.0, rank=0), 6) == pytest.approx([0.025, 0.05, 0.1, 0.125, 0.125, 0.125])


@given(rank=st.none() | st.integers(0, 5000), give_up_s=st.floats(0.01, 1000), attempts=st.integers(1, 80))
@settings(max_examples=200, deadline=None)
def test_every_delay_is_bounded(rank: int | None, give_up_s: float, attempts: int) -> None:
    """Never negative, never far above a quarter of a second, never past the give-up time; and it does end."""
    retry, now, start = Retry("a:1", give_up_s, rank), 7.0, 7.0
    for attempt in range(attempts):
        try:
            delay = retry.failed(now, "refused")
        except UnreachableError:
            assert now - start >= give_up_s
            return
        assert now - start < give_up_s
        assert retry.num_failures == attempt + 1
        assert 0 <= delay <= 0.375
        # The last attempt comes at the give-up time, not after it; 1e-6 for the sum of floats.
        assert now + delay - start <= give_up_s + 1e-6
        now += delay + 1e-6


def test_very_many_attempts_do_not_overflow() -> None:
    retry = Retry("a:1", 1e9)
    for attempt in range(3000):
        assert 0 < retry.failed(float(attempt), "refused") <= 0.375


def test_ranks_come_back_one_after_another() -> None:
    """Two hundred workers that lost one server together do not return in one instant."""
    settled = sorted(delays(Retry("a:1", 60.0, rank), 8)[-1] for rank in range(200))
    gaps = [later - earlier for earlier, later in pairwise(settled)]
    assert min(gaps) > 0
    assert max(gaps) < 0.01
    assert settled[-1] - settled[0] > 0.22
    assert delays(Retry("a:1", 60.0, 3), 8) == delays(Retry("a:1", 60.0, 3), 8), "and it is no chance"


def test_giving_up_says_where_how_long_and_why() -> None:
    retry = Retry("10.0.0.1:50051", 5.0)
    retry.failed(100.0, "connection refused")
    retry.failed(104.9, "connection refused")
    with pytest.raises(UnreachableError) as caught:
        retry.failed(105.0, "name not known")
    assert caught.value.message == ("no server at 10.0.0.1:50051 for 5 s (worker.give_up_s is 5): name not known")
    assert "ps-server --listen" in caught.value.fix
    assert "--server" in caught.value.fix
    assert caught.value.exit_code == 15


def test_reaching_the_server_starts_afresh() -> None:
    retry = Retry("a:1", 5.0)
    first = delays(retry, 4, start=0.0)
    retry.reached()
    assert retry.num_failures == 0
    assert delays(retry, 4, start=1000.0) == first
    retry.failed(1004.0, "refused")
    with pytest.raises(UnreachableError):
        retry.failed(1005.0, "refused")


# ---- progress ---------------------------------------------------------------------------------------


def test_without_weights_the_base_version_is_the_old_one() -> None:
    """Staleness is counted from what the gradient was computed on, not from what the server said last."""
    progress = Progress()
    progress.replied(reply_of(0, 5, 1))
    progress.replied(reply_of(1, 9, 1, None))
    assert (progress.row.seq, progress.version) == (1, 5)
    progress.replied(reply_of(2, 11, 1))
    assert progress.version == 11


def test_after_a_lost_connection_the_servers_word_counts() -> None:
    progress = Progress(rank=2)
    progress.welcomed("run1", 2, 1)
    progress.replied(reply_of(4, 10, 3))
    progress.took_step()
    progress.welcomed("run1", 2, 2)
    assert (progress.row.seq, progress.steps_left) == (4, 2), "a welcome alone changes nothing: it may be resumed"
    progress.replied(reply_of(5, 12, 3))
    assert (progress.incarnation, progress.row.seq, progress.version, progress.steps_left) == (2, 5, 12, 3)


@given(
    step=st.integers(0, 50), local=st.integers(1, 8), following=st.integers(0, 8), missed=st.integers(0, 5),
    taken=st.integers(0, 8),
)  # fmt: skip
def test_a_contribution_that_is_computed_once_more_changes_nothing(step, local, following, missed, taken) -> None:
    """However many of its steps were taken: afterwards the process is where the server said, and sends the next one."""
    progress = Progress()
    progress.replied(reply_of(4, 9, following, training_steps=step + local + missed))
    wanted, number, is_done = progress.position, progress.next_number, progress.is_done
    progress.replay(Position(step, local, batches=0))
    assert progress.position == step and progress.is_replaying and not progress.is_done
    for count in range(1, min(taken, local) + 1):
        assert progress.took_step() == (count == local)
        assert progress.position == step + count
    assert progress.replayed() == missed
    assert (progress.position, progress.next_number, progress.is_done) == (wanted, number, is_done)
    assert progress.steps_left == progress.local_steps == following and not progress.is_replaying


def test_a_start_ends_what_is_computed_once_more() -> None:
    progress = Progress()
    progress.replied(reply_of(4, 9, 1))
    progress.replay(Position(3, 1, 0))
    progress.replied(reply_of(2, 7, 1, training_steps=2))
    assert not progress.is_replaying and progress.position == 2


def test_a_worker_that_has_not_begun_names_its_incarnation_and_no_run() -> None:
    """It may join another run, and stays out if another process has replaced it."""
    progress = Progress(process="this")
    progress.welcomed("first", rank=1, incarnation=2)
    joins = [join_message(progress, "cpu", {})]
    progress.started(reply_of())
    joins.append(join_message(progress, "cpu", {}))
    assert [(join.run, join.incarnation) for join in joins] == [("", 2), ("first", 2)]
