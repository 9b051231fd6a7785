"""ps-launch check: mutations of a simulated run's history are found, and forgeries that are no single mutation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paramserver.tests.drills.histories import Line, messages, verdict_of
from paramserver.tests.drills.mutations import mutations
from paramserver.tests.drills.simulation import ALL_MODES, ROUND_MODES, SETTINGS, server_segments, simulate

WANTED = 0.95  # the rest are what a server did not write before it was killed, or a mode whose rules say the same


@pytest.mark.parametrize("mode", ALL_MODES)
def test_mutations_of_simulated_histories_are_found(mode: str) -> None:
    missed, num = [], 0
    for seed in range(6):
        chance = random.Random(seed)
        every = list(mutations(simulate(mode, chance)))
        for mutation in chance.sample(every, min(30, len(every))):
            num += 1
            if verdict_of(mutation.lines).is_good:
                missed.append(f"line {mutation.line + 1}: {mutation.name}")
    assert 1 - len(missed) / num >= WANTED, missed


def pick(lines: list[Line], chance: random.Random, wanted: Callable[[Line], bool]) -> int:
    found = [at for at, line in enumerate(lines) if line["role"] == "server" and wanted(line)]
    assume(found)
    return chance.choice(found)


def apply_twice(lines: list[Line], chance: random.Random) -> None:
    """A commit once more, as a version of its own; every later version is one higher."""
    at = pick(lines, chance, lambda line: line["op"] == "commit")
    segment = next(segment for segment in server_segments(lines) if at in segment)
    again = dict(lines[at])
    for line in lines[at + 1 : segment.stop]:
        for key in ("version", "base_version"):
            if key in line and line[key] >= again["version"]:
                line[key] += 1
    again["version"] += 1
    lines.insert(at + 1, again)


def lose_what_was_durable(lines: list[Line], chance: random.Random) -> None:
    """The server starts from nothing although there was a snapshot with something in it."""
    at = pick(lines, chance, lambda line: line["op"] == "start" and line["version"] > 0)
    lines[at] |= {"version": 0, "rows": {}, "source": None}


@pytest.mark.parametrize("forge", [apply_twice, lose_what_was_durable], ids=lambda forge: forge.__name__)
@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(ALL_MODES))
def test_a_forgery_is_found(forge: Callable[[list[Line], random.Random], None], seed: int, mode: str) -> None:
    chance = random.Random(seed)
    lines = json.loads(json.dumps(simulate(mode, chance)))  # no line shares a part with another
    forge(lines, chance)
    assert not verdict_of(lines).is_good


@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(ROUND_MODES))
def test_a_round_without_a_live_worker_is_found(seed: int, mode: str) -> None:
    chance = random.Random(seed)
    lines = json.loads(json.dumps(simulate(mode, chance)))
    at = pick(lines, chance, lambda line: line["op"] == "commit" and len(line["contributions"]) > 1)
    lines[at]["contributions"].pop()
    assert "leaves out" in messages(lines)
