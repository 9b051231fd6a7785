"""ps-launch check: histories of simulated runs are accepted, and every mutation of one is found.

The simulation drives the real policies through joins, departures, repeats, snapshots and restarts, and
writes what a server and its workers would write.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paramserver.common.registry import MODES
from paramserver.drills.check import Verdict, check
from paramserver.ps.engine.modes import policy_of
from paramserver.ps.policies.base import Answer, Commit, Contribution, Discard, Refuse
from paramserver.ps.policies.rules import Rule

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
ALL_MODES = MODES.names()
ROUND_MODES = ("sync", "localsgd")
Line = dict[str, Any]


def verdict_of(lines: list[Line]) -> Verdict:
    return check({"h": [json.dumps(line).encode() + b"\n" for line in lines]})


def messages(lines: list[Line]) -> str:
    return "\n".join(map(str, verdict_of(lines).problems))


# ---- the simulated run ----------------------------------------------------------------------------


class Simulation:
    """A run of `mode` with up to `num_workers` ranks; `lines` is its history."""

    def __init__(self, mode: str, chance: random.Random, num_workers: int, staleness: int) -> None:
        self.mode, self.chance, self.num_workers = mode, chance, num_workers
        self.options = {"training_steps": 10_000, "staleness": staleness, "local_steps": 1}
        self.lines: list[Line] = []
        self.snapshots: list[tuple[int, dict[int, int]]] = []
        self.being_written: list[tuple[int, dict[int, int]]] = []
        self.incarnations: dict[int, int] = {}
        self.seated: set[int] = set()  # have joined, and have not said what they train
        self.contributed: set[int] = set()  # have contributed since they were let in
        self.held: dict[int, int] = {}  # live ranks that compute, and the version they compute on
        self.unanswered: set[int] = set()
        self.server_incarnation = 0
        self.start()

    def write(self, op: str, role: str = "server", **fields: Any) -> None:
        self.lines.append({"op": op, "role": role, "t": float(len(self.lines)), **fields})

    def start(self) -> None:
        self.server_incarnation += 1
        self.policy = policy_of(self.mode, self.options)
        version, steps = self.snapshots[-1] if self.snapshots else (0, {})
        if self.snapshots:
            self.policy.restore(version, steps, {})
        self.held, self.unanswered, self.being_written, self.seated = {}, set(), [], set()
        self.write(
            "start", run="r", server_incarnation=self.server_incarnation, mode=self.mode,
            staleness=self.policy.staleness_bound, workers=None, version=version,
            steps={str(rank): step for rank, step in steps.items()}, source="s" if self.snapshots else None,
        )  # fmt: skip

    def place(self, rank: int) -> Line:
        return {"rank": rank, "incarnation": self.incarnations[rank], "step": self.policy.num_counted.get(rank, 0)}

    def join(self, rank: int) -> None:
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        self.write("join", **self.place(rank), resumed=False)
        self.seated.add(rank)

    def enter(self, rank: int) -> None:
        """A worker that has joined says what it trains, and is a member from here on."""
        self.seated.remove(rank)
        self.contributed.discard(rank)
        decisions = self.policy.joined(rank, 0.0)
        self.unanswered.add(rank)
        self.perform(decisions)
        server = {"run": "r", "server_incarnation": self.server_incarnation, "version": self.policy.version}
        self.write("start", "worker", **self.place(rank), **server)

    def leave(self, rank: int, how: str = "closed") -> None:
        self.write("leave", rank=rank, incarnation=self.incarnations[rank], how=how)
        self.held.pop(rank, None)
        self.unanswered.discard(rank)
        self.seated.discard(rank)
        self.perform(self.policy.left(rank, 0.0))

    def resume(self, rank: int) -> None:
        """The same process again after a lost connection; it asks for the answer it did not get."""
        self.incarnations[rank] += 1
        self.write("join", **self.place(rank), resumed=True)
        self.policy.disconnected(rank)
        was_lost = rank in self.held and self.chance.random() < 0.5
        if rank in self.contributed and (was_lost or rank in self.unanswered):
            self.contribute(rank, self.policy.num_counted[rank], self.policy.version)
        elif rank in self.unanswered:  # it was never told where to start
            self.leave(rank, "replaced")

    def contribute(self, rank: int, step: int, base_version: int) -> None:
        counted, version = self.policy.num_counted[rank], self.policy.version
        self.write(
            "send", "worker", rank=rank, incarnation=self.incarnations[rank], step=step, base_version=base_version
        )
        decisions = self.policy.contributed(rank, Contribution(step, base_version), 0.0)
        discarded = any(isinstance(decision, Discard) for decision in decisions)
        refused = any(isinstance(decision, Refuse) for decision in decisions)
        outcome = (
            "refused" if refused else "accepted" if not discarded else "repeated" if step == counted else "dropped"
        )
        self.write(
            "accept", rank=rank, incarnation=self.incarnations[rank], step=step, base_version=base_version,
            version=version, outcome=outcome,
        )  # fmt: skip
        if not refused:
            self.held.pop(rank, None)
            self.unanswered.add(rank)
            self.contributed.add(rank)
        self.perform(decisions)

    def perform(self, decisions: list[Any]) -> None:
        for decision in decisions:
            match decision:
                case Commit(ranks):
                    self.write(
                        "commit", version=self.policy.version, members=sorted(self.policy.members),
                        contributions=[[r, self.accepting(r), self.policy.num_counted[r]] for r in ranks],
                    )  # fmt: skip
                case Answer(rank, outcome):
                    place = {"rank": rank, "incarnation": self.incarnations[rank]}
                    told: Line = {
                        "step": self.policy.num_counted[rank],
                        "version": self.policy.version,
                        "outcome": outcome.name,
                    }
                    self.write("answer", **place, **told)
                    if outcome.name != "START":
                        self.write("answered", "worker", **place, **told)
                    self.unanswered.discard(rank)
                    self.held[rank] = self.policy.version

    def accepting(self, rank: int) -> int:
        """The incarnation whose contribution was accepted last."""
        for line in reversed(self.lines):
            if line["op"] == "accept" and line["rank"] == rank and line["outcome"] == "accepted":
                return line["incarnation"]
        raise AssertionError("committed without being accepted")

    def act(self) -> None:
        chance, live = self.chance, sorted(self.policy.members)
        computing, seated = sorted(self.held), sorted(self.seated)
        absent = [rank for rank in range(self.num_workers) if rank not in {*live, *seated}]
        roll = chance.random()
        if seated and roll > 0.7:
            self.enter(chance.choice(seated))
        elif absent and (roll < 0.15 or not live):
            self.join(chance.choice(absent))
        elif roll < 0.20 and [*live, *seated]:
            self.leave(chance.choice([*live, *seated]))
        elif roll < 0.25 and live:
            self.resume(chance.choice(live))
        elif roll < 0.32:
            self.being_written.append((self.policy.version, self.policy.num_committed()))
        elif roll < 0.40 and self.being_written:
            version, steps = self.being_written.pop(0)
            self.snapshots.append((version, steps))
            told = {str(rank): step for rank, step in steps.items()}
            self.write("snapshot", version=version, steps=told, path="s", sha256="0")
        elif roll < 0.43 and self.snapshots:
            self.start()
        elif computing:
            rank = chance.choice(computing)
            step, base_version = self.policy.num_counted[rank] + 1, self.held[rank]
            self.contribute(rank, step, base_version)


def simulate(mode: str, chance: random.Random, *, num_events: int = 80) -> list[Line]:
    run = Simulation(mode, chance, num_workers=chance.randint(1, 4), staleness=chance.randint(0, 2))
    for _ in range(num_events):
        run.act()
    if chance.random() < 0.5:
        run.write("end", version=run.policy.version, steps={str(r): s for r, s in run.policy.num_committed().items()})
    return run.lines


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


# ---- mutations ------------------------------------------------------------------------------------


def server_segments(lines: list[Line]) -> list[range]:
    """Positions of each server start and what follows it."""
    starts = [i for i, line in enumerate(lines) if line["op"] == "start" and line["role"] == "server"]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


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


def skip_a_step(lines: list[Line], chance: random.Random) -> None:
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


def join_at_another_step(lines: list[Line], chance: random.Random) -> None:
    def is_known(i: int) -> bool:
        segment = next(segment for segment in server_segments(lines) if i in segment)
        rank = lines[i].get("rank")
        return is_op(lines, i, "join") and any(is_op(lines, j, "answer", rank=rank) for j in range(segment.start, i))

    lines[pick(lines, chance, is_known)]["step"] += 1


def snapshot_of_other_steps(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: is_op(lines, i, "snapshot") and lines[i]["steps"])
    lines[at]["steps"][chance.choice(sorted(lines[at]["steps"]))] += 1


def lose_what_was_durable(lines: list[Line], chance: random.Random) -> None:
    """The server starts from nothing although there was a snapshot with something in it."""
    at = pick(lines, chance, lambda i: is_op(lines, i, "start") and lines[i]["version"] > 0)
    lines[at] |= {"version": 0, "steps": {}, "source": None}


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
        place = {key: lines[i][key] for key in ("rank", "incarnation")}
        for line in rest_of_segment(lines, i):
            if line["op"] == "join" and line["rank"] == place["rank"]:
                return False
            if line["op"] == "commit":
                return any(is_op(lines, j, "answer", **place) for j in range(i))
        return False

    del lines[pick(lines, chance, matters)]


def answer_with_older_weights(lines: list[Line], chance: random.Random) -> None:
    def is_later(i: int) -> bool:
        segment = next(segment for segment in server_segments(lines) if i in segment)
        return is_op(lines, i, "answer", outcome="APPLIED") and any(
            is_op(lines, j, "answer", rank=lines[i]["rank"], incarnation=lines[i]["incarnation"])
            for j in range(segment.start, i)
        )

    lines[pick(lines, chance, is_later)]["version"] = 0


def answer_from_the_future(lines: list[Line], chance: random.Random) -> None:
    lines[pick(lines, chance, lambda i: is_op(lines, i, "answer"))]["version"] += 1


def tell_a_worker_what_is_not_true(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: lines[i]["op"] == "answered" and lines[i]["outcome"] == "APPLIED")
    lines[at]["step"] += 100


def show_a_worker_older_weights(lines: list[Line], chance: random.Random) -> None:
    at = pick(lines, chance, lambda i: lines[i]["op"] == "answered" and lines[i]["version"] > 0)
    lines.insert(at + 1, {**lines[at], "version": lines[at]["version"] - 1})


MUTATIONS = [
    repeat_a_commit, apply_twice, drop_a_commit, skip_a_step, change_a_version, forget_an_acceptance,
    accept_of_an_older_incarnation, join_with_an_old_incarnation, join_at_another_step, snapshot_of_other_steps,
    lose_what_was_durable, same_server_incarnation, negative_staleness, forget_a_departure,
    answer_with_older_weights, answer_from_the_future, tell_a_worker_what_is_not_true, show_a_worker_older_weights,
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


# ---- by hand --------------------------------------------------------------------------------------


def start(mode: str, *, incarnation: int = 1, version: int = 0, steps: dict | None = None, **more: Any) -> Line:
    told = {"run": "r", "server_incarnation": incarnation, "mode": mode, "workers": 2, "staleness": None}
    source = "s" if version else None
    return {"op": "start", "role": "server", **told, "version": version, "steps": steps or {}, "source": source, **more}


def op(name: str, rank: int | None = None, incarnation: int = 1, **fields: Any) -> Line:
    place = {} if rank is None else {"rank": rank, "incarnation": incarnation}
    return {"op": name, "role": "server", **place, **fields}


def applied(rank: int, step: int, version: int, *members: int) -> list[Line]:
    """A contribution of an async or ssp run, from acceptance to answer."""
    return [
        op("accept", rank, step=step, base_version=version - 1, version=version - 1, outcome="accepted"),
        op("commit", version=version, contributions=[[rank, 1, step]], members=list(members)),
        op("answer", rank, step=step, version=version, outcome="APPLIED"),
    ]


def joined(*ranks: int) -> list[Line]:
    lines = [op("join", rank, step=0, resumed=False) for rank in ranks]
    return lines + [op("answer", rank, step=0, version=0, outcome="START") for rank in ranks]


def test_ssp_lets_nobody_run_ahead() -> None:
    lines = [start("ssp", staleness=1), *joined(0, 1)]
    for step in (1, 2):
        lines += applied(0, step, step, 0, 1)
    assert messages(lines) == "h:11: rank 0 may go on 2 contributions ahead of the slowest: at most 1 are allowed"
    lines[0]["staleness"] = 2
    assert messages(lines) == ""


def test_a_round_may_close_without_stragglers_only_where_that_is_allowed() -> None:
    lines = [start("sync"), *joined(0, 1), *applied(0, 1, 1, 0, 1)]
    assert "h:7: version 1 was made without the live rank 1" in messages(lines)
    lines[0]["backup_workers"] = 1
    assert messages(lines) == ""


def test_a_contribution_of_a_worker_that_left_stays_in_its_round() -> None:
    lines = [start("sync"), *joined(0, 1)]
    lines += [op("accept", rank, step=1, base_version=0, version=0, outcome="accepted") for rank in (0, 1)]
    lines += [op("leave", 1, how="closed"), op("commit", version=1, contributions=[[0, 1, 1], [1, 1, 1]], members=[0])]
    assert messages(lines) == ""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_skipped_step_counts_and_is_in_no_version(mode: str) -> None:
    """store.on_nonfinite: skip. A version is made all the same."""
    lines = [start(mode), *joined(0), *applied(0, 1, 1, 0)]
    skipped = applied(0, 2, 2, 0)
    skipped[0]["outcome"], skipped[1]["contributions"], skipped[2]["outcome"] = "skipped", [], "REJECTED"
    lines += [*skipped, op("snapshot", version=2, steps={"0": 2}, path="s"), *applied(0, 3, 3, 0)]
    lines += [start(mode, incarnation=2, version=2, steps={"0": 2}), op("join", 0, 2, step=2, resumed=False)]
    assert messages(lines) == ""
    tally = verdict_of(lines).tally
    assert (tally.applied, tally.skipped, tally.durable, tally.rolled_back) == (1, 1, 1, 1)


def test_what_a_restart_takes_back_is_made_again() -> None:
    before = [start("async"), *joined(0), *applied(0, 1, 1, 0), op("snapshot", version=1, steps={"0": 1}, path="s")]
    again = start("async", incarnation=2, version=1, steps={"0": 1})
    rejoined = [op("join", 0, 2, step=1, resumed=False), op("answer", 0, 2, step=1, version=1, outcome="START")]
    lines = [*before, *applied(0, 2, 2, 0), again, *rejoined]
    tally = verdict_of(lines).tally
    assert messages(lines) == ""
    assert (tally.applied, tally.rolled_back, tally.lost, tally.durable, tally.restarts) == (1, 1, 1, 1, 1)
    redone = applied(0, 2, 2, 0)
    redone[0]["incarnation"] = redone[2]["incarnation"] = redone[1]["contributions"][0][1] = 2
    tally = verdict_of([*lines, *redone]).tally
    assert (tally.applied, tally.rolled_back, tally.lost) == (2, 1, 0)


def test_an_older_snapshot_is_a_loss_unless_the_newer_was_unusable() -> None:
    lines = [start("async"), *joined(0)]
    for step in (1, 2):
        lines += [*applied(0, step, step, 0), op("snapshot", version=step, steps={"0": step}, path=f"s{step}")]
    lines.append(start("async", incarnation=2, version=1, steps={"0": 1}))
    assert "h:12: the server starts at version 1, and version 2 was in a snapshot: 1 durable contributions" in messages(
        lines
    )
    lines[-1]["skipped"] = ["s2"]
    assert messages(lines) == ""


def test_a_snapshot_that_the_server_could_not_mention_is_no_loss() -> None:
    """Killed between the snapshot's rename and its line in the history."""
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0), start("async", incarnation=2, version=1, steps={"0": 1})]
    assert messages(lines) == ""


def test_commits_that_only_the_snapshot_knows_are_counted() -> None:
    lines = [start("async"), *joined(0, 1), *applied(0, 1, 1, 0, 1)]
    lines.append(start("async", incarnation=2, version=3, steps={"0": 2, "1": 1}))
    assert messages(lines) == ""
    verdict = verdict_of(lines)
    assert (verdict.tally.applied, verdict.lineage.sizes()) == (3, {1: 1, 2: 1, 3: 1})
    lines.insert(-1, op("end", version=1, steps={"0": 1, "1": 0}))  # nothing was cut
    assert "the server starts at version 3, and only 1 versions were committed" in messages(lines)
    del lines[-2]
    lines[-1]["steps"]["0"] = 0
    assert "rank 0 at step 0, committed were 1" in messages(lines)


def test_what_a_worker_was_told_by_a_server_that_was_cut_short_is_no_loss() -> None:
    told = {"role": "worker", "rank": 0, "incarnation": 1}
    lines = [
        start("async"),
        *joined(0),
        {"op": "start", **told, "run": "r", "server_incarnation": 1, "step": 0, "version": 0},
        *applied(0, 1, 1, 0),
        {"op": "send", **told, "step": 2, "base_version": 1},
        {"op": "answered", **told, "step": 2, "version": 2, "outcome": "APPLIED"},
    ]
    assert messages(lines) == ""
    lines.append(op("end", version=1, steps={"0": 1}))
    assert "rank 0 is told that step 2 was applied: the server never committed it" in messages(lines)


def test_a_new_run_in_the_same_file_begins_anew() -> None:
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0), start("async", run="other"), *joined(0)]
    assert messages(lines) == ""
    assert verdict_of(lines).tally.applied == 1


# ---- files ----------------------------------------------------------------------------------------


def encoded(*lines: Line) -> list[bytes]:
    return [json.dumps(line).encode() + b"\n" for line in lines]


def test_half_a_line_is_allowed_where_a_process_died() -> None:
    first = [start("async"), *joined(0)]
    half = b'{"op":"accept","role":"ser'
    assert check({"h": [*encoded(*first), half]}).is_good
    again = json.dumps(start("async", incarnation=2)).encode() + b"\n"
    assert check({"h": [*encoded(*first), half + again]}).is_good
    later = check({"h": [*encoded(*first), half + encoded(*applied(0, 1, 1, 0))[0]]})
    assert [str(problem) for problem in later.problems] == [
        "h:4: half a line, and then accept: only a start may follow what a killed process left"
    ]
    shared = {"op": "send", "role": "worker", "rank": 0, "incarnation": 1, "step": 1, "base_version": 0}
    assert check({"h": [*encoded(*first), half + encoded(shared)[0]]}).is_good
    middle = check({"h": [*encoded(*first), half + b"\n", *encoded(*applied(0, 1, 1, 0))]})
    assert [str(problem) for problem in middle.problems] == ["h:4: not a JSON object"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"op": "jump", "role": "server"}, "operation 'jump' of role 'server'"),
        ({"op": "join", "role": "cook"}, "operation 'join' of role 'cook'"),
        ({"op": "leave", "role": "server", "rank": 0, "incarnation": 1}, "leave without 'how'"),
        ({"op": "end", "role": "server", "version": -1, "steps": {}}, "it must be a whole number"),
        ({"op": "end", "role": "server", "version": 1, "steps": {"a": 1}}, "it must be {rank: step}"),
    ],
)
def test_a_line_of_another_form_is_named(line: Line, message: str) -> None:
    assert message in messages([start("async"), line])


def test_without_a_servers_history_nothing_can_be_said() -> None:
    lines = [{"op": "end", "role": "worker", "rank": 0, "step": 1}]
    assert "no server has written here" in messages(lines)
    assert "no server has written here" in "\n".join(map(str, check({}).problems))


def test_the_command(tmp_path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0)]
    good.write_bytes(b"".join(encoded(*lines)))
    bad.write_bytes(b"".join(encoded(*lines, *applied(0, 1, 2, 0))))

    def run(*files: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "paramserver.launch", "check", *map(str, files)]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    kept, broken, missing = run(good), run(bad), run(tmp_path / "none")
    assert (kept.returncode, broken.returncode, missing.returncode) == (0, 1, 2)
    assert "every contribution was applied once" in kept.stdout
    assert f"{bad}:8: rank 0 step 1 is committed again: it was on line 5" in broken.stdout
    assert "cannot be read" in missing.stderr


# ---- rules of a mode ------------------------------------------------------------------------------


class _NeverSoFarAhead(Rule):
    def answered(self, rank: int, lead: int) -> str | None:
        return f"rank {rank} is as far ahead as it must not be" if lead == self.start["options_of_ours"] else None


def test_a_mode_of_ones_own_brings_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("OwnPolicy", (), {"rules": (_NeverSoFarAhead,), "answers_before_commit": False})
    monkeypatch.setattr(type(MODES), "names", lambda self: ["own"])
    monkeypatch.setattr(type(MODES), "load", lambda self, name: kind)
    lines: list[Line] = [
        {"op": "start", "role": "server", "t": 0.0, "run": "r", "server_incarnation": 1, "mode": "own", "workers": None,
         "staleness": None, "version": 0, "steps": {}, "source": None, "options_of_ours": 0},
        {"op": "join", "role": "server", "t": 1.0, "rank": 0, "incarnation": 1, "step": 0, "resumed": False},
        {"op": "answer", "role": "server", "t": 2.0, "rank": 0, "incarnation": 1, "step": 0, "version": 0,
         "outcome": "START"},
    ]  # fmt: skip
    assert "rank 0 is as far ahead as it must not be" in messages(lines)
    lines[0]["options_of_ours"] = 3
    assert "as far ahead as it must not be" not in messages(lines)
