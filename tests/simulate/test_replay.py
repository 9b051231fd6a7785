"""A recorded run decides the same once more; one that was tampered with does not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paramserver.common.errors import UsageError
from paramserver.common.registry import MODES
from paramserver.drills.history_lines import Line
from paramserver.simulate.recorded.replay import replay
from paramserver.tests.drills.simulation import simulate
from paramserver.tests.simulate.histories import recorded

EVERY_MODE = pytest.mark.parametrize("mode", [mode for mode in MODES.names() if not MODES.load(mode).kind.has_peers])


@EVERY_MODE
@pytest.mark.parametrize(
    "policy",
    [{}, {"straggler_timeout_s": 1.5}, {"straggler_mad": 3.0}, {"backup_workers": 1}, {"delayed_update": True}],
)
def test_all_decisions_of_a_run_in_which_workers_fail_are_the_same(mode: str, policy: dict[str, Any]) -> None:
    if policy.get("delayed_update") and not MODES.load(mode).may_delay_update:
        return
    lines = recorded(mode, 5, 24, policy, jitter=0.4, mtbf_s=25.0, back_s=2.0, latency_s=0.02)
    verdict = replay(lines)
    assert (verdict.problem, verdict.decided) == (None, "") and verdict.notes == []
    assert verdict.num_decisions == sum(line.op in ("accept", "commit", "reply") for line in lines) > 15


@pytest.mark.parametrize("seed", range(3))
@EVERY_MODE
def test_all_decisions_are_the_same_with_lost_connections_and_restarts(mode: str, seed: int) -> None:
    """The histories of the checker's own tests: joins, departures, repeats, snapshots, restarts."""
    texts = enumerate(simulate(mode, random.Random(seed)), 1)
    lines = [Line("h", number, text["role"], text["op"], {**text, "t": 0.0}) for number, text in texts]
    verdict = replay(lines)
    assert (verdict.problem, verdict.decided) == (None, "")


@pytest.mark.parametrize(
    ("op", "field", "value", "decided"),
    [
        ("commit", "members", [0, 1], "commit version 1"),
        ("reply", "version", 7, "reply rank"),
        ("accept", "outcome", "dropped", "accept rank"),
    ],
)
def test_a_decision_that_was_another_one_is_named_with_its_line(op: str, field: str, value: Any, decided: str) -> None:
    lines = recorded("sync", 3, 12, mtbf_s=10.0, back_s=1.0)
    at = next(at for at, line in enumerate(lines) if line.op == op)
    wrong = [*lines[:at], replace(lines[at], fields={**lines[at].fields, field: value}), *lines[at + 1 :]]
    verdict = replay(wrong)
    assert verdict.problem is not None and verdict.problem.number == at + 1 and verdict.decided.startswith(decided)


def test_a_contribution_that_is_missing_is_missed() -> None:
    lines = recorded("sync", 3, 6)
    at = next(at for at, line in enumerate(lines) if line.op == "accept")
    verdict = replay([*lines[:at], *lines[at + 1 :]])
    assert verdict.problem is not None and verdict.problem.message.startswith("recorded: commit version 1")
    assert verdict.decided == "nothing"


def test_a_mode_that_is_not_here_is_asked_for() -> None:
    lines = recorded("ssp", 2, 6)
    with pytest.raises(UsageError, match=r"mode mine.py:Mine is not installed here"):
        replay([replace(lines[0], fields={**lines[0].fields, "mode": "mine.py:Mine"}), *lines[1:]])
