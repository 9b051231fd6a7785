"""ps-launch check: histories of simulated runs are accepted."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paramserver.ps.core import events
from paramserver.tests.drills.histories import Line, messages, verdict_of
from paramserver.tests.drills.simulation import ALL_MODES, SETTINGS, Simulation, server_segments, simulate


@pytest.mark.parametrize("mode", ALL_MODES)
@SETTINGS
@example(seed=630)  # dssp: an evicted rank comes back after a restart
@example(seed=700338)  # sync: and its server goes back to a snapshot of before
@given(seed=st.integers(0, 2**32))
def test_what_a_server_may_do_is_accepted(mode: str, seed: int) -> None:
    lines = simulate(mode, random.Random(seed))
    verdict = verdict_of(lines)
    assert verdict.problems == []
    assert verdict.num_lines == len(lines)
    tally = verdict.tally
    committed = sum(len(line["contributions"]) for line in lines if line["op"] == "commit")
    assert tally.applied == committed - tally.rolled_back
    assert tally.durable <= tally.applied
    assert tally.lost <= tally.rolled_back
    assert tally.restarts == sum(line["op"] == "start" and line["role"] == "server" for line in lines) - 1
    assert tally.repeated == sum(line.get("outcome") == "repeated" for line in lines)


@pytest.mark.parametrize("mode", ALL_MODES)
@SETTINGS
@given(seed=st.integers(0, 2**32))
def test_what_a_killed_server_could_not_write_any_more_is_no_loss(mode: str, seed: int) -> None:
    chance = random.Random(seed)
    lines = [line for line in simulate(mode, chance) if line["op"] != "end"]
    kept: list[Line] = []
    for segment in server_segments(lines):
        last = chance.randint(max(segment.start, segment.stop - 8), segment.stop)
        kept += [lines[i] for i in segment if i <= last or lines[i]["role"] == "worker"]
    assert messages(kept) == ""


@pytest.mark.parametrize("is_in_snapshot", [False, True])
@pytest.mark.parametrize("mode", ["sync", "localsgd", "diloco", "ssp"])
def test_a_rank_that_was_evicted_comes_back_after_a_restart(mode: str, is_in_snapshot: bool) -> None:
    run = Simulation(mode, random.Random(0), num_workers=2, staleness=9)

    def act(action: str, *ranks: int) -> None:
        for rank in ranks:
            run.contribute(rank, run.workers[rank].version) if action == "contribute" else getattr(run, action)(rank)
        while run.being_written:
            run.store()

    for action in ("join", "offer", "contribute"):
        act(action, 0, 1)
    run.happens(events.Controlled("evict", 1))
    if is_in_snapshot:
        act("contribute", 0)
    run.start()
    for action in ("join", "offer", "contribute"):
        act(action, 0)
    act("join", 1)
    if is_in_snapshot:  # a version between the join and the START
        act("contribute", 0)
    act("offer", 1)
    act("contribute", 0, 1)
    assert messages(run.lines) == ""
    assert sum(line["op"] == "reply" and line["rank"] == 1 and line["outcome"] == "START" for line in run.lines) == 2
