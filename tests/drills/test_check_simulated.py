"""ps-launch check: histories of simulated runs are accepted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.tests.drills.histories import Line, messages, verdict_of
from paramserver.tests.drills.simulation import ALL_MODES, SETTINGS, server_segments, simulate


@pytest.mark.parametrize("mode", ALL_MODES)
@SETTINGS
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
