"""Runs under the virtual clock: closed forms, what holds in every mode, and the same events for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paramserver.common.config.schema import SlowdownConfig, TaskConfig
from paramserver.common.errors import UsageError
from paramserver.common.registry import MODES
from paramserver.ps.core import effects
from paramserver.simulate.plan import Flags, resolve, worlds
from paramserver.simulate.results.summary import ideal_rate, metrics, percentile, summary, time_cells, time_pictures
from paramserver.simulate.run.simulation import Simulation
from paramserver.tests.simulate.worlds import MB, config_of, simulated, world_of
from paramserver.web.stored import write_report

EVERY_MODE = pytest.mark.parametrize("mode", [mode for mode in MODES.names() if not MODES.load(mode).kind.has_peers])


def commit_times(mode: str, num_workers: int, steps: int, **settings: Any) -> list[float]:
    facts: list[tuple[float, effects.Fact]] = []
    config, world = config_of(mode, num_workers, steps), world_of(num_workers, **settings)
    Simulation(config, world, observe=lambda at, fact: facts.append((at, fact))).go()
    return [at for at, fact in facts if isinstance(fact, effects.Commit)]


# ---- closed forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_round_takes_computing_both_transfers_and_the_latency(num_workers: int) -> None:
    """1 s, 1 s up, 1 s down, 0.1 s, and the server's 0.02 for each fold and 0.03 for the step."""
    times = commit_times("sync", num_workers, 5, fold_s=0.02, step_s=0.03)
    assert times[0] == pytest.approx(0.05 + 1 + 1 + 0.05, abs=1e-9)
    served_s = num_workers * 0.02 + 0.03
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == pytest.approx([3.1 + served_s] * 4, abs=1e-9)


def test_the_servers_link_is_shared_by_all() -> None:
    times = commit_times("sync", 8, 3, up=4.0 * MB, down=4.0 * MB, server_up=1.0 * MB, server_down=2.0 * MB)
    assert times[1] - times[0] == pytest.approx(1 + 8 + 4 + 0.1, abs=1e-9)


def test_no_more_uploads_at_once_than_the_server_holds() -> None:
    """Two by two, and in the order in which they are folded; a place is free when the last byte has come."""
    times = commit_times("sync", 8, 2, max_staged=2)
    assert times[1] - times[0] == pytest.approx(1 + 4 + 1 + 0.1 + 3 * 0.05, abs=1e-9)


def test_a_straggler_holds_who_may_not_go_on_without_it() -> None:
    slow = {"speeds": (1.0, 1.0, 0.25), "up": float("inf"), "down": float("inf"), "latency_s": 0.0}
    assert simulated("sync", 3, 10, **slow).now == pytest.approx(40.0)
    freely = simulated("async", 3, 10, **slow)
    assert freely.tally.seconds["mode"] == 0.0
    simulation = simulated("ssp", 3, 10, {"staleness": 1}, **slow)
    assert simulation.tally.seconds["mode"] > 0.0 and metrics(simulation)["lead max"] == 2


def test_delayed_update_hides_the_exchange_behind_computing() -> None:
    links = {"up": 4.0 * MB, "down": 4.0 * MB, "latency_s": 0.0}
    plain = simulated("async", 2, 20, **links)
    hidden = simulated("async", 2, 20, {"delayed_update": True}, **links)
    assert plain.now == pytest.approx(20 * 1.5)
    assert hidden.now == pytest.approx(20 * 1.0 + 0.5)
    assert hidden.tally.num_steps == plain.tally.num_steps == 40


# ---- what holds in every mode ------------------------------------------------------------------------


@EVERY_MODE
@pytest.mark.parametrize("is_failing", [False, True])
def test_any_run_keeps_to_what_holds_of_time_and_of_counts(mode: str, is_failing: bool) -> None:
    """Time never goes back, staleness is not negative, all steps are taken, bytes are payloads times contributions."""
    facts: list[tuple[float, effects.Fact]] = []
    config, failing = config_of(mode, 6, 24), {"mtbf_s": 20.0, "back_s": 2.0} if is_failing else {}
    slow = SlowdownConfig(straggler_probability=0.1)
    world = world_of(
        6, up=3.0 * MB, server_up=8.0 * MB, jitter=0.3, slowdown=slow, fold_s=0.01, max_staged=4, **failing
    )
    simulation = Simulation(config, world, observe=lambda at, fact: facts.append((at, fact)))
    simulation.go()

    times = [at for at, _ in facts]
    assert times == sorted(times)
    taken = [fact for _, fact in facts if isinstance(fact, effects.ContributionTaken)]
    assert all(fact.version >= fact.contribution.base.version for fact in taken)
    assert min(simulation.tally.staleness) >= 0
    accepted = sum(fact.outcome == "accepted" for fact in taken)
    found = summary(simulation)
    assert sum(worker.contributions for worker in found.workers) == accepted
    assert (simulation.tally.num_failures > 0) == is_failing
    if not is_failing:
        assert simulation.tally.num_steps == 6 * 24
        assert sum(worker.bytes_sent for worker in found.workers) == accepted * MB
        assert 0 < metrics(simulation)["of ideal"] < 1


@EVERY_MODE
def test_the_same_seed_gives_the_same_events_and_another_one_others(mode: str) -> None:
    digests = [simulated(mode, 5, 16, jitter=0.2, seed=seed).tally.digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_computing_takes_what_it_is_told_to_on_average() -> None:
    run = simulated("async", 20, 50, jitter=0.5, speeds=(1.0, 2.0))
    assert ideal_rate(run) == pytest.approx(10 * 1.0 + 10 * 2.0, rel=0.05)


def test_a_round_that_closes_by_time_does_without_the_straggler() -> None:
    quick = {"up": 100.0 * MB, "down": 100.0 * MB, "speeds": (1.0, 1.0, 0.1)}
    run = simulated("sync", 3, 20, {"straggler_timeout_s": 2.0}, **quick)
    assert run.now < 100.0 and metrics(run)["dropped"] > 0


def joining(mode: str, num_first: int, steps: int, joins_at: tuple[float, ...]) -> Simulation:
    """As `--join-at` makes one: a run without a number of workers."""
    config = config_of(mode, num_first, steps)
    config = config.model_copy(update={"run": config.run.model_copy(update={"workers": None})})
    return Simulation(config, world_of(num_first + len(joins_at), joins_at=joins_at))


@EVERY_MODE
def test_who_joins_late_begins_where_the_slowest_is(mode: str) -> None:
    steps = 24 if config_of(mode, 2, 1).policy.options(mode).model_dump().get("local_steps", 1) == 1 else 400
    alone = simulated(mode, 2, steps)
    run = joining(mode, 2, steps, (alone.now / 2, alone.now / 2))
    run.go()
    first, late = run.workers[:2], run.workers[2:]
    assert all(worker.done_steps == steps for worker in run.workers)
    assert all(0 < late_one.num_received < first[0].num_received for late_one in late)
    assert 2 * steps < run.tally.num_steps < 4 * steps


def test_who_would_join_after_the_end_is_in_no_summary() -> None:
    run = joining("sync", 2, 4, (1e6,))
    run.go()
    assert [worker.rank for worker in summary(run).workers] == [0, 1]


def test_versions_that_workers_hold_are_as_far_apart_as_the_slowest_is_slow() -> None:
    """In sync the replies of one round are all of one version; a worker ten times as slow holds an old one in async."""
    free = {"up": float("inf"), "down": float("inf"), "latency_s": 0.0}
    assert metrics(simulated("sync", 3, 10, **free))["skew max"] == 0
    slow = simulated("async", 2, 40, speeds=(1.0, 0.1), **free)
    assert metrics(slow)["skew max"] == pytest.approx(10, abs=2)
    assert metrics(slow)["skew p50"] <= 2, "the fast one is through after a tenth of the time"
    assert [sample.at for sample in slow.tally.samples] == sorted(sample.at for sample in slow.tally.samples)


def test_the_report_shows_where_the_time_went(tmp_path: Path) -> None:
    runs = [(mode, simulated(mode, 3, 20, jitter=0.3)) for mode in ("sync", "async")]
    pictures = time_pictures(runs)
    assert [file for file, *_ in pictures] == ["time-of-sync.png", "time-of-async.png"]
    curves = dict(pictures[0][3])
    assert set(curves) == {"computing", "waiting for the mode", "own link"}
    for parts in zip(*curves.values(), strict=True):
        assert sum(part for _, part in parts) == pytest.approx(1.0)
    found = [(mode, summary(run)) for mode, run in runs]
    write_report(str(tmp_path), "Simulated", found, extra=([time_cells(runs)], pictures))
    html, text = ((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert html.count("where the time of its workers went") == 2 and '"sync: where' in html
    assert "| mode | computing | waiting for the mode |" in text


def test_percentiles_are_values_that_were_there() -> None:
    assert [percentile(Counter({0: 98, 7: 2}), part) for part in (0.5, 0.98, 0.99, 1.0)] == [0, 0, 7, 7]
    assert percentile(Counter(), 0.5) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"failures": "mtbf=0s,back=30s"}, "hardly ever ends a step of 100ms"),
        ({"failures": "mtbf=1ms,back=1s"}, "every 1ms"),
        ({"failures": "mtbf=1h,mtbf=2h,back=1s"}, "not of the form mtbf=...,back=..."),
        ({"stragglers": "p=0.1,p=0.9,x=5"}, "not of the form p=...,x=..."),
        ({"failures": "mtbf=1h"}, "not of the form"),
        ({"bandwidth": "100"}, "flag --bandwidth"),
        ({"latency": "40"}, "flag --latency"),
        ({"compute": "0s"}, "the time of a training step must be positive"),
        ({"join_at": "60s:0"}, "'0' is not a number from 1"),
        ({"join_at": "4"}, "'4' is not a time"),
    ],
)
def test_what_cannot_be_simulated_is_said_before_the_task_is_loaded(flags: dict[str, str], message: str) -> None:
    config = config_of("sync", 2, 4).model_copy(update={"task": TaskConfig(name="nowhere.py:Task")})
    with pytest.raises(UsageError) as error:
        worlds([config], Flags(**flags))
    assert message in str(error.value)


def test_a_part_of_the_model_at_a_time_is_refused() -> None:
    with pytest.raises(UsageError, match=r"policy\.fragments is 5"):
        resolve(None, "diloco", 2, {"run.steps": 50}, ["policy.fragments=5"], {})


def test_all_modes_are_those_that_can_be_simulated() -> None:
    found = [config.run.mode for config in resolve(None, "all", 2, {"run.steps": 50}, [], {})]
    assert set(MODES.names()) - set(found) == {"allreduce"}
