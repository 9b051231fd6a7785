"""How fast a run trains: the live rate of a rank, and what a training step of all takes."""

from __future__ import annotations

import pytest

from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.judgement import SOUND, Judgement
from paramserver.common.wire.records import Row
from paramserver.ps.core import effects
from paramserver.ps.core.counting import Traffic, WorkerSource, WorkerStats

from ...records import contributed
from .runs import started


def test_the_live_rate_is_of_the_newest_contributions() -> None:
    stats = WorkerStats(0)
    stats.accepted(0, 32, 0, 7.0)  # however long it took to begin
    assert stats.samples_per_s(7.0) == 0.0
    for step in range(1, 101):
        stats.accepted(0, 32 if step <= 50 else 64, 0, 7.0 + 0.1 * step)
    assert stats.samples_per_s(17.0) == pytest.approx(640.0)


def test_a_step_takes_what_the_run_takes_whoever_closes_its_rounds() -> None:
    """With a backup worker: rank 0 closes the first half of the rounds, rank 1 the second, what the other sends is
    dropped."""
    run = started("sync", 60, backup_workers=1)
    counted = [0, 0]
    for version in range(60):
        first = 0 if version < 30 else 1
        for rank, at in ((first, 5.0 + 0.02 * version), (1 - first, 5.001 + 0.02 * version)):
            run.apply(contributed(rank, 1, counted[rank] + 1, version, at=at, num_samples=32))
        counted[first] += 1
    assert run.policy.min_steps_done == 60 and [run.roster.stats[rank].dropped for rank in range(2)] == [30, 30]
    assert run.contributions.step_s == pytest.approx(0.02)


def test_the_first_step_of_the_last_to_begin_is_not_in_it_and_the_slowest_counts() -> None:
    run = started("async", 11)
    for number in range(1, 12):
        run.apply(contributed(0, 1, number, run.policy.version, at=1.0 + 0.01 * number))
    assert run.contributions.step_s == 0.0, "rank 1 has taken none yet"
    for number in range(1, 12):
        run.apply(contributed(1, 1, number, run.policy.version, at=9.0 + 0.05 * number))
    assert run.contributions.step_s == pytest.approx(0.05)
    assert run.contributions.staleness == {0: 22}, "of what each had built on, which was the newest"


def test_training_steps_and_the_steady_part_are_counted_apart_from_contributions() -> None:
    """18 steps of each, 8 in a contribution: the last one has two. What comes before all have taken their first is
    no part of the pace."""
    run = started("localsgd", 18, local_steps=8)
    for version, num_steps in enumerate((8, 8, 2)):
        for rank in range(2):
            at = 100.0 + 4.0 * version + rank
            contribution = contributed(
                rank, 1, version + 1, version, at=at, num_samples=10 * num_steps, num_steps=num_steps
            )
            run.apply(contribution)
    assert [run.policy.row(rank) for rank in range(2)] == [Row(3, 18, 180, 18)] * 2
    seconds, samples, steps = run.contributions.steady()
    assert (seconds, samples, steps) == (8.0, 200, 20)  # since 101.0, when both had contributed


def test_a_run_of_one_step_has_no_steady_part() -> None:
    run = started("async", 1)
    for rank in range(2):
        run.apply(contributed(rank, 1, 1, 0, at=5.0, num_samples=32))
    assert run.contributions.steady() == (0.0, 0, 0)


def test_the_last_step_of_an_all_reduce_is_counted_when_its_round_is_made() -> None:
    run = started("allreduce", 3)
    for version in range(3):
        for rank in range(2):
            contribution = contributed(rank, 1, version + 1, version, at=1.0 + version, num_samples=8)
            run.apply(contribution)
    assert [run.policy.row(rank) for rank in range(2)] == [Row(3, 3, 24, 3)] * 2


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_skipped_upload_of_weights_counts_with_its_round_and_is_not_kept(is_sound: bool) -> None:
    run = started("allreduce", 3)
    judgement = SOUND if is_sound else Judgement("skip", "NaN", "store.on_nonfinite is skip")
    run.apply(contributed(0, 1, 1, 0, kind=ContributionKind.WEIGHTS, judgement=judgement))
    found = run.apply(contributed(1, 1, 1, 0, kind=ContributionKind.COMPLETION))
    taken = [(effect.outcome, effect.is_kept) for effect in found if isinstance(effect, effects.ContributionTaken)]
    assert taken == [("accepted", True) if is_sound else ("skipped", False), ("accepted", False)]
    assert run.policy.version == 1 and run.policy.has_newest_weights is is_sound


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_training_step_of_several_parts_is_one(mode: str) -> None:
    run = started(mode, 4)
    for number in range(1, 9):
        for rank in range(2):
            part = 2 - number % 2
            contribution = contributed(
                rank, 1, number, run.policy.version, at=float(number), num_samples=8 if part == 1 else 1,
                num_steps=2 - part, part=part,
            )  # fmt: skip
            run.apply(contribution)
    assert [run.policy.row(rank) for rank in range(2)] == [Row(8, 4, 32, 4, 2)] * 2


def test_samples_that_nobody_said_stay_unknown_over_a_snapshot_that_holds_them() -> None:
    run = started("buffered", 100, buffer=2)
    for number, num_samples in enumerate((32, 32, 0), 1):
        run.apply(contributed(0, 1, number, run.policy.version, at=float(number), num_samples=num_samples))
    source = WorkerSource(0, run.policy, run.roster.stats[0], Traffic(), now=9.0)
    assert (source.row.samples, source.samples_per_s) == (None, None)
    assert run.saved(9.0)["rows"][0].samples == 64  # no version has the third one yet
    run.apply(contributed(0, 1, 4, run.policy.version, at=4.0, num_samples=32))
    assert run.saved(9.0)["rows"][0] == Row(4, 4, None, 4)


def test_a_snapshot_has_the_sums_of_its_version_however_many_contributions_are_open() -> None:
    """Of rank 0 are 30 in no version yet; with one more of rank 1, 40 would make the second one."""
    run = started("buffered", 100, buffer=40)
    for number in range(1, 71):
        run.apply(contributed(0, 1, number, run.policy.version, at=float(number), num_samples=8))
    assert run.policy.version == 1
    training = run.saved(71.0)["training"]
    assert run.saved(71.0)["rows"][0] == Row(40, 40, 320, 40)
    assert training["staleness"] == {"0": 40}


@pytest.mark.parametrize(("mode", "options"), [
    ("async_diloco", {"local_steps": 1, "quorum": 2, "grace": 1.0}),
    ("async_diloco", {"local_steps": 1, "quorum": 2, "grace": 1.0, "outer_delay": 2, "outer_momentum": 0.5}),
    ("buffered", {"buffer": 2}),
])  # fmt: skip
def test_the_others_do_not_move_the_share_of_a_skipped_contribution(mode: str, options: dict[str, object]) -> None:
    """Of two with 10 and 30 samples, the second is not finite: the first moves a quarter, as without the skip."""
    found = {}
    for action in ("take", "skip"):
        run, commits = started(mode, 10, weighting="samples", **options), []
        for rank, (num_samples, judged) in enumerate(((10, "take"), (30, action))):
            judgement = Judgement(judged, "" if judged == "take" else "NaN", "")
            event = contributed(rank, 1, 1, 0, at=5.0, num_samples=num_samples, judgement=judgement)
            commits += [effect for effect in run.apply(event) if isinstance(effect, effects.Commit)]
        (commit,) = commits
        outer = commit.hyperparameters[0] if commit.hyperparameters else {}
        found[action] = commit.lr_scale * outer.get("share", 1.0)
    weight = (10.0, 30.0) if mode == "buffered" else (100.0, 900.0)
    assert found["skip"] == pytest.approx(found["take"] * weight[0] / sum(weight))
