"""ps-launch check: short histories, written by hand, that break a rule or do not; and rules of a mode's own."""

from __future__ import annotations

import pytest

from paramserver.common.registry import MODES
from paramserver.common.reporting.regions import region_run
from paramserver.drills.check import check
from paramserver.ps.policies.rules import Rule
from paramserver.tests.drills.histories import applied, encoded, joined, messages, op, options_of, start, verdict_of


def test_ssp_lets_nobody_run_ahead() -> None:
    lines = [start("ssp", staleness=1), *joined(0, 1)]
    for seq in (1, 2):
        lines += applied(0, seq, seq, 0, 1)
    assert messages(lines) == "h:13: rank 0 may go on 2 contributions ahead of the slowest: at most 1 are allowed"
    lines[0] = start("ssp", staleness=2)
    assert messages(lines) == ""
    lines[0], lines[-1]["last"] = start("ssp", staleness=1), True
    assert messages(lines) == "", "who takes no more steps is ahead of nobody"


def test_ranks_with_other_numbers_for_the_same_steps_are_compared_by_their_steps() -> None:
    """After a resume from another mode."""
    rows = {"0": [10, 10, 10, 10, 0], "1": [0, 10, 0, 10, 0]}
    lines = [start("ssp", version=10, staleness=1, rows=rows)]
    lines += [op("join", rank, seq=seq, resumed=False) for rank, seq in ((0, 10), (1, 0))]
    lines += [op("enter", rank, seq=seq) for rank, seq in ((0, 10), (1, 0))]
    lines += [
        op("reply", rank, seq=seq, version=10, outcome="START", training_steps=10) for rank, seq in ((0, 10), (1, 0))
    ]
    lines += applied(0, 11, 11, 0, 1)
    assert messages(lines) == ""
    lines += applied(0, 12, 12, 0, 1)
    assert "rank 0 may go on 2 contributions ahead" in messages(lines)


def test_a_round_may_close_without_stragglers_only_where_that_is_allowed() -> None:
    lines = [start("sync"), *joined(0, 1), *applied(0, 1, 1, 0, 1)]
    assert "h:9: version 1 was made without the live rank 1" in messages(lines)
    lines[0]["options"] = options_of("sync", backup_workers=1)
    assert messages(lines) == ""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_skipped_contribution_counts_and_is_in_no_version(mode: str) -> None:
    """store.on_nonfinite: skip. A version is made all the same."""
    lines = [start(mode), *joined(0), *applied(0, 1, 1, 0)]
    skipped = applied(0, 2, 2, 0)
    skipped[0]["outcome"], skipped[1]["contributions"], skipped[2]["outcome"] = "skipped", [], "REJECTED"
    lines += [*skipped, op("snapshot", version=2, seqs={"0": 2}, path="s"), *applied(0, 3, 3, 0)]
    lines += [start(mode, incarnation=2, version=2, seqs={"0": 2}), op("join", 0, 2, seq=2, resumed=False)]
    assert messages(lines) == ""
    tally = verdict_of(lines).tally
    assert (tally.applied, tally.skipped, tally.durable, tally.rolled_back) == (1, 1, 1, 1)


def test_what_a_restart_takes_back_is_made_again() -> None:
    before = [start("async"), *joined(0), *applied(0, 1, 1, 0), op("snapshot", version=1, seqs={"0": 1}, path="s")]
    again = start("async", incarnation=2, version=1, seqs={"0": 1})
    rejoined = [op("join", 0, 2, seq=1, resumed=False), op("enter", 0, 2, seq=1)]
    rejoined.append(op("reply", 0, 2, seq=1, version=1, outcome="START"))
    lines = [*before, *applied(0, 2, 2, 0), again, *rejoined]
    tally = verdict_of(lines).tally
    assert messages(lines) == ""
    assert (tally.applied, tally.rolled_back, tally.lost, tally.durable, tally.restarts) == (1, 1, 1, 1, 1)
    redone = applied(0, 2, 2, 0)
    redone[0]["incarnation"] = redone[2]["incarnation"] = redone[1]["contributions"][0][1] = 2
    tally = verdict_of([*lines, *redone]).tally
    assert (tally.applied, tally.rolled_back, tally.lost) == (2, 1, 0)


def test_the_samples_of_a_contribution_that_was_made_again_are_those_of_the_newest_line() -> None:
    lines = [line for n in (1, 2) for line in (start("async", incarnation=n), *joined(0), *applied(0, 1, 1, 0))]
    lines[3]["samples"], lines[-3]["samples"] = 9, 4
    assert verdict_of(lines).samples == {(0, 1): 4}


def test_an_older_snapshot_is_a_loss_unless_the_newer_was_unusable_or_deleted() -> None:
    lines = [start("async"), *joined(0)]
    for seq in (1, 2):
        lines += [*applied(0, seq, seq, 0), op("snapshot", version=seq, seqs={"0": seq}, path=f"s{seq}")]
    again = start("async", incarnation=2, version=1, seqs={"0": 1})
    loss = "h:13: the server starts at version 1, but version 2 was in a snapshot: 1 durable contributions are lost"
    for there in ({}, {"found": [2, 1]}):
        assert messages([*lines, {**again, **there}]) == loss
        assert not verdict_of([*lines, {**again, **there}]).deleted
    assert messages([*lines, {**again, "skipped": ["s2"]}]) == ""
    verdict = verdict_of([*lines, {**again, "found": [1]}])
    assert verdict.is_good
    (message,) = verdict.deleted
    assert message.startswith("h:13: the server starts at version 1: the newer snapshot of version 2 was deleted")


def test_a_server_that_is_stopped_before_its_run_begins_ends_nothing() -> None:
    """While it waits for its other shards it is at version 0, whatever the run is at."""
    begun = [start("async"), *joined(0), *applied(0, 1, 1, 0), op("snapshot", version=1, seqs={"0": 1}, path="s")]
    early, late = op("end", version=0, seqs={}, begun=False), op("end", version=0, seqs={})
    assert messages([*begun, op("end", version=1, seqs={"0": 1}), early]) == ""
    assert messages([early, *begun]) == ""
    assert "the run ends at version 0, but version 1 was committed last" in messages([*begun, late])


def test_commits_that_only_the_snapshot_knows_are_counted() -> None:
    lines = [start("async"), *joined(0, 1), *applied(0, 1, 1, 0, 1)]
    lines.append(start("async", incarnation=2, version=3, seqs={"0": 2, "1": 1}))
    assert messages(lines) == ""
    verdict = verdict_of(lines)
    assert (verdict.tally.applied, verdict.lineage.sizes()) == (3, {1: 1, 2: 1, 3: 1})
    lines.insert(-1, op("end", version=1, seqs={"0": 1, "1": 0}))  # nothing was cut
    assert "the server starts at version 3, but only 1 versions were committed" in messages(lines)
    del lines[-2]
    lines[-1]["rows"]["0"][0] = 0
    assert "rank 0 at number 0, committed were 1" in messages(lines)


def test_what_a_worker_was_told_by_a_server_that_was_cut_short_is_no_loss() -> None:
    settings = {"role": "worker", "rank": 0, "incarnation": 1}
    lines = [
        start("async"),
        *joined(0),
        {"op": "start", **settings, "run": "r", "server_incarnation": 1, "seq": 0, "version": 0},
        *applied(0, 1, 1, 0),
        {"op": "send", **settings, "seq": 1, "base_version": 0, "num_steps": 1, "num_batches": 1},
        {"op": "replied", **settings, "seq": 1, "version": 1, "outcome": "APPLIED"},
        {"op": "send", **settings, "seq": 2, "base_version": 1, "num_steps": 1, "num_batches": 1},
        {"op": "replied", **settings, "seq": 2, "version": 2, "outcome": "APPLIED"},
    ]
    assert messages(lines) == ""
    lines.append(op("end", version=1, seqs={"0": 1}))
    assert "rank 0 is told that contribution 2 was applied: the server never committed it" in messages(lines)


def test_a_contribution_of_another_run_is_not_the_one_that_a_worker_was_told_of() -> None:
    worker = {"role": "worker", "rank": 0, "incarnation": 1}
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0), start("async", run="other"), *joined(0)]
    lines += [
        {"op": "start", **worker, "run": "other", "server_incarnation": 1, "seq": 0, "version": 0},
        {"op": "send", **worker, "seq": 1, "base_version": 0, "num_steps": 1, "num_batches": 1},
        {"op": "replied", **worker, "seq": 1, "version": 0, "outcome": "APPLIED"},
        op("end", version=0, seqs={"0": 0}),
    ]
    found = "rank 0 is told that contribution 1 was applied: the server never committed it"
    assert found in messages(lines)


def test_samples_that_another_run_set_aside_are_not_counted_in_a_region() -> None:
    above = [start("async"), *joined(0), {**applied(0, 1, 1, 0)[0], "outcome": "dropped", "samples": 4}]
    region = [start("async", run=region_run("r", 0)), *joined(0)]
    for lines, run in ((above, "s"), (region, region_run("s", 0))):
        lines += [start("async", run=run), *joined(0), *applied(0, 1, 1, 0)]
        lines[-3]["samples"] = 8
    assert list(map(str, check({"above": encoded(*above), "region": encoded(*region)}).problems)) == []


def test_a_new_run_in_the_same_file_begins_anew() -> None:
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0), start("async", run="other"), *joined(0)]
    assert messages(lines) == ""
    assert verdict_of(lines).tally.applied == 1


class _NeverSoFarAhead(Rule):
    def replied(self, rank: int, lead: int) -> str | None:
        return f"rank {rank} is as far ahead as it must not be" if lead == self.start["options_of_ours"] else None


def test_a_mode_of_ones_own_brings_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("OwnPolicy", (MODES.load("async"),), {"rules": (_NeverSoFarAhead,)})
    monkeypatch.setattr(type(MODES), "names", lambda self: ["own"])
    monkeypatch.setattr(type(MODES), "load", lambda self, name: kind)
    lines = [start("async", options_of_ours=0) | {"mode": "own"}, *joined(0)]
    assert "rank 0 is as far ahead as it must not be" in messages(lines)
    lines[0]["options_of_ours"] = 3
    assert "as far ahead as it must not be" not in messages(lines)


def test_a_reply_names_the_steps_of_the_ranks_contributions() -> None:
    lines = [start("async"), *joined(0), *applied(0, 1, 1, 0)]
    lines[-1]["training_steps"] = 2
    assert messages(lines) == "h:7: rank 0 goes on at training step 2: its contributions have 1"


def test_a_round_that_leaves_a_rank_behind_moves_it_too() -> None:
    """Rank 1 misses two rounds; meanwhile rank 0 has contributed to a third."""
    lines = [start("sync", options=options_of("sync") | {"straggler_timeout_s": 1.0}), *joined(0, 1)]
    lines += [*applied(0, 1, 1, 0, 1), *applied(0, 2, 2, 0, 1), applied(0, 3, 3, 0, 1)[0]]
    late = op("accept", 1, seq=1, base_version=0, version=2, outcome="DROPPED")
    reply = op("reply", 1, seq=0, version=2, outcome="DROPPED") | {"training_steps": 2}
    assert messages([*lines, late, reply]) == ""
    wrong = messages([*lines, late, reply | {"training_steps": 3}])
    assert "rank 1 goes on at training step 3: its contributions have 2" in wrong
