"""ps-launch check: every mutation of a simulated run's history is found."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paramserver.tests.drills.histories import Line, messages, verdict_of
from paramserver.tests.drills.simulation import ALL_MODES, ROUND_MODES, SETTINGS, server_segments, simulate


def pick(lines: list[Line], chance: random.Random, wanted: Callable[[int], bool]) -> int:
    found = [i for i in range(len(lines)) if wanted(i)]
    assume(found)
    return chance.choice(found)


def rest_of_segment(lines: list[Line], at: int) -> list[Line]:
    segment = next(segment for segment in server_segments(lines) if at in segment)
    return lines[at + 1 : segment.stop]


def is_op(lines: list[Line], at: int, op: str, **fields: Any) -> bool:
    line = lines[at]
    return line["op"] == op and line["role"] == "server" and all(line[key] == value for key, value in fields.items())


def committed_later(lines: list[Line], at: int) -> bool:
    return any(line["op"] == "commit" for line in rest_of_segment(lines, at))


def repeat_a_commit(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "commit"))
    lines.insert(at + 1, lines[at])


def apply_twice(lines: list[Line], chance: random.Random) -> None:
    """A commit once more, as a version of its own; every later version is one higher."""
    at = pick(lines, chance, lambda i: is_op(lines, i, "commit"))
    segment = next(segment for segment in server_segments(lines) if at in segment)
    again = dict(lines[at])
    for line in lines[at + 1 : segment.stop]:
        for key in ("version", "base_version"):
            if key in line and line[key] >= again["version"]:
                line[key] += 1
    again["version"] += 1
    lines.insert(at + 1, again)


def drop_a_commit(lines: list[Line], chance: random.Random) -> None:
    del lines[pick(lines, chance, lambda i: is_op(lines, i, "commit") and committed_later(lines, i))]


def skip_a_number(lines: list[Line], chance: random.Random) -> None:
    """A contribution and its commit vanish; versions stay whole."""
    at = pick(lines, chance, lambda i: is_op(lines, i, "commit") and committed_later(lines, i))
    rank, _, step = lines[at]["contributions"][0]
    for line in lines[at:]:
        if line["op"] == "commit":
            line["contributions"] = [[r, i, s + (r == rank and s >= step)] for r, i, s in line["contributions"]]


def change_a_version(lines: list[Line], chance: random.Random) -> None:
    lines[pick(lines, chance, lambda i: is_op(lines, i, "commit"))]["version"] += chance.choice([-1, 1])


def forget_an_acceptance(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "accept", outcome="accepted") and committed_later(lines, i))
    del lines[at]


def accept_of_an_older_incarnation(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "accept", outcome="accepted") and lines[i]["incarnation"] > 1)
    lines[at]["incarnation"] -= 1


def join_with_an_old_incarnation(lines: list[Line], chance: random.Random) -> None:
    def is_second(i: int) -> bool:
        segment = next(segment for segment in server_segments(lines) if i in segment)
        earlier = [lines[j] for j in range(segment.start, i)]
        return is_op(lines, i, "join") and any(
            line["op"] == "join" and line["rank"] == lines[i]["rank"] for line in earlier
        )

    lines[pick(lines, chance, is_second)]["incarnation"] -= 1


def join_at_another_number(lines: list[Line], chance: random.Random) -> None:
    def is_known(i: int) -> bool:
        segment = next(segment for segment in server_segments(lines) if i in segment)
        rank = lines[i].get("rank")
        return is_op(lines, i, "join") and any(is_op(lines, j, "reply", rank=rank) for j in range(segment.start, i))

    lines[pick(lines, chance, is_known)]["seq"] += 1


def snapshot_of_other_numbers(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "snapshot") and lines[i]["rows"])
    lines[at]["rows"][chance.choice(sorted(lines[at]["rows"]))][0] += 1


def lose_what_was_durable(lines: list[Line], chance: random.Random) -> None:
    """The server starts from nothing although there was a snapshot with something in it."""
    at = pick(lines, chance, lambda i: is_op(lines, i, "start") and lines[i]["version"] > 0)
    lines[at] |= {"version": 0, "rows": {}, "source": None}


def same_server_incarnation(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "start") and lines[i]["server_incarnation"] > 1)
    lines[at]["server_incarnation"] -= 1


def negative_staleness(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "accept", outcome="accepted"))
    lines[at]["base_version"] = lines[at]["version"] + 1


def forget_a_departure(lines: list[Line], chance: random.Random) -> None:
    def matters(i: int) -> bool:
        """A member leaves, and the next commit comes before it is back."""
        if not is_op(lines, i, "leave"):
            return False
        identity = {key: lines[i][key] for key in ("rank", "incarnation")}
        for line in rest_of_segment(lines, i):
            if line["op"] == "join" and line["rank"] == identity["rank"]:
                return False
            if line["op"] == "commit":
                return any(is_op(lines, j, "reply", **identity) for j in range(i))
        return False

    del lines[pick(lines, chance, matters)]


def reply_with_older_weights(lines: list[Line], chance: random.Random) -> None:
    """Older than what this worker has been given: `buffered` replies version 0 until its first group is full."""

    def is_later(i: int) -> bool:
        segment = next(segment for segment in server_segments(lines) if i in segment)
        return is_op(lines, i, "reply", outcome="APPLIED") and any(
            is_op(lines, j, "reply", rank=lines[i]["rank"], incarnation=lines[i]["incarnation"])
            and lines[j]["version"] > 0
            for j in range(segment.start, i)
        )

    lines[pick(lines, chance, is_later)]["version"] = 0


def reply_from_the_future(lines: list[Line], chance: random.Random) -> None:
    lines[pick(lines, chance, lambda i: is_op(lines, i, "reply"))]["version"] += 1


def tell_a_worker_what_is_not_true(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: lines[i]["op"] == "replied" and lines[i]["outcome"] == "APPLIED")
    lines[at]["seq"] += 100


def show_a_worker_older_weights(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: lines[i]["op"] == "replied" and lines[i]["version"] > 0)
    lines.insert(at + 1, {**lines[at], "version": lines[at]["version"] - 1})


MUTATIONS = [
    repeat_a_commit, apply_twice, drop_a_commit, skip_a_number, change_a_version, forget_an_acceptance,
    accept_of_an_older_incarnation, join_with_an_old_incarnation, join_at_another_number, snapshot_of_other_numbers,
    lose_what_was_durable, same_server_incarnation, negative_staleness, forget_a_departure,
    reply_with_older_weights, reply_from_the_future, tell_a_worker_what_is_not_true, show_a_worker_older_weights,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(ALL_MODES))
def test_every_mutation_is_found(mutate: Callable[[list[Line], random.Random], None], seed: int, mode: str) -> None:
    chance = random.Random(seed)
    lines = json.loads(json.dumps(simulate(mode, chance)))  # no line shares a part with another
    mutate(lines, chance)
    assert not verdict_of(lines).is_good


@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(ROUND_MODES))
def test_a_round_without_a_live_worker_is_found(seed: int, mode: str) -> None:
    chance = random.Random(seed)
    lines = json.loads(json.dumps(simulate(mode, chance)))
    at = pick(lines, chance, lambda i: is_op(lines, i, "commit") and len(lines[i]["contributions"]) > 1)
    lines[at]["contributions"].pop()
    assert "leaves out" in messages(lines)
