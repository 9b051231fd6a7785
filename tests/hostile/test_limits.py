"""Limits on joins, on the bytes of one worker and on workers: who is within them is served, only later."""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.errors import ParamServerError, Reason
from paramserver.ps.wire.stream import JoinQueue, LogThrottle, RateLimiter, TimeBudget, Watchdog

from . import conftest as wire

NUM_JOINS = 200


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- the rules, on a clock of their own -----------------------------------------------------------


@given(st.floats(0.2, 1000), st.integers(1, 300), st.lists(st.floats(0, 0.5), max_size=60))
def test_joins_keep_to_their_rate_and_none_within_the_limit_is_refused(per_s, limit, pauses):
    clock = Clock()
    joins = JoinQueue(per_s, limit, clock)
    turns, waiting, refused = [], [], []
    for pause in pauses:
        clock.now += pause
        waiting = [turn for turn in waiting if turn > clock.now]
        try:
            turns.append(clock.now + joins.reserve())
            waiting.append(turns[-1])
        except ParamServerError as error:
            refused.append((error.reason, len(waiting)))
    assert all(reason is Reason.NOT_READY and num_waiting >= limit for reason, num_waiting in refused)
    assert turns == sorted(turns)
    burst = max(1.0, per_s)
    for first in range(len(turns)):
        for last in range(first, len(turns)):
            assert last - first + 1 <= burst + (turns[last] - turns[first]) * per_s + 1.001


def test_a_queue_of_joins_is_bounded_and_drains():
    clock = Clock()
    joins = JoinQueue(10.0, 50, clock)
    waits = [joins.reserve() for _ in range(60)]
    assert waits[:10] == pytest.approx([0.0] * 10, abs=1e-6)
    assert waits[-1] == pytest.approx(5.0)
    with pytest.raises(ParamServerError, match="50 workers wait to join"):
        joins.reserve()
    clock.now += 5.1
    assert [joins.reserve(), joins.reserve()] == pytest.approx([0.0, 0.1], abs=1e-6)


def test_bytes_keep_to_their_rate():
    clock = Clock()
    limiter = RateLimiter(1000.0, clock)
    taken = 0
    for _ in range(100):
        clock.now += limiter.wait_s()
        limiter.consume(300)
        taken += 300
    assert taken <= 1000 * (clock.now - 1000.0) + 1301
    assert clock.now - 1000.0 == pytest.approx(29, abs=1)


def test_a_line_in_a_second_says_how_many_were_left_out():
    clock = Clock()
    throttle = LogThrottle(clock)
    lines = []
    for index in range(25):
        throttle.log(lambda event, at, left_out: lines.append((at, left_out)), "refused", at=index)
        clock.now += 0.1
    assert lines == [(0, 0), (10, 9), (20, 9)]


@given(st.floats(1, 100), st.integers(1000, 10**6), st.floats(0.01, 3))
def test_who_keeps_the_least_pace_is_never_late_and_who_does_not_is(limit_s, bytes_per_limit, factor):
    """Pieces of a tenth of what must come in the time; `factor` times as fast as they must be."""
    budget = TimeBudget(limit_s, bytes_per_limit)
    piece = bytes_per_limit // 10
    pause_s = limit_s * piece / bytes_per_limit / factor
    num_pieces, least_s = 0, limit_s
    while num_pieces < 2000 and pause_s <= budget.left_s:
        budget.add_bytes(piece, pause_s)
        least_s = min(least_s, budget.left_s)
        num_pieces += 1
    if factor >= 1.01:
        assert num_pieces == 2000
    elif factor < 0.98:
        assert num_pieces * piece <= bytes_per_limit / (1 / factor - 1) + piece


class Stopwatch:
    """What `Watchdog` does to a stream."""

    def __init__(self) -> None:
        self.forgiven_s = 0.0
        self.num_looks = 0

    def check(self, now: float, pause_s: float) -> None:
        self.num_looks += 1
        self.forgiven_s += pause_s


async def test_time_in_which_the_server_itself_stood_still_is_nobodys_fault():
    watch, stream, began = Watchdog(), Stopwatch(), time.monotonic()
    watch.add(stream)
    while stream.num_looks < 2:
        await asyncio.sleep(0.05)
    before, looks_s = stream.forgiven_s, time.monotonic() - began
    assert before == 0 or looks_s > 1, "it stood still for a moment, and not for a second"
    time.sleep(1.5)
    while stream.num_looks < 4:
        await asyncio.sleep(0.05)
    watch.remove(stream)
    assert 1.5 - 0.2 < stream.forgiven_s - before < time.monotonic() - began


# ---- through a real server -------------------------------------------------------------------------


def join_at_once(server: Any) -> tuple[list[float], tuple[str, str, str]]:
    """How long each join took; and how one more than the limit ended while all were there."""

    def join(peer: Any) -> float:
        """Seconds from the first byte to the first weights."""
        started = time.perf_counter()
        peer.join()
        return time.perf_counter() - started

    peers = [server.peer(rank) for rank in range(1, NUM_JOINS)]
    with ThreadPoolExecutor(len(peers)) as pool:
        took = list(pool.map(join, peers))
    late = server.peer(NUM_JOINS)
    late.send(wire.join_bytes(NUM_JOINS))
    ended = late.ended()
    for peer in peers:
        peer.close()
    return took, ended


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "direct"])
def test_two_hundred_workers_join_at_once(start_server, transport):
    """And again when all connections are lost at once; one more than the limit is refused, and says why."""
    rate = 1_000_000
    limits = ("--set", f"limits.workers={NUM_JOINS}", "--set", f"limits.upload_bytes_per_s={rate}")
    server = start_server(*wire.ENDLESS, *limits)
    server.transport = transport
    first = server.peer(0)
    first.join()
    for action in ("join", "join again"):
        took, late = join_at_once(server)
        p50, p99 = statistics.median(took), sorted(took)[int(len(took) * 0.99)]
        print(f"{NUM_JOINS} workers {action} ({transport}): p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")
        assert p99 < 10
        assert {event["tensors"] for event in server.events("admitted")} == {transport}
        assert late[:2] == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
        assert f"{NUM_JOINS} workers are here" in late[2]
    assert {event["reason"] for event in server.events("refused")} == {"LIMIT_EXCEEDED"}
    # A worker's bytes keep to their rate: a second's worth at once, and the sender waits with the rest.
    started, num_contributions = time.monotonic(), 6
    for _ in range(num_contributions):
        first.contribute()
        assert first.reply() == "APPLIED"
    assert time.monotonic() - started > (num_contributions - 1) * 4 * wire.NUM_FLOATS / rate - 1.0
