"""Who is stopped at the first step on a rank that has contributed before, who is warned, and who hears nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from paramserver.common.errors import UsageError
from paramserver.common.wire.records import RateInfo, Row
from paramserver.worker.session import Progress
from paramserver.worker.training.position import memory
from paramserver.worker.training.position.memory import Restarted, schedulers_of


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(memory.log, "warning", lambda event, **fields: found.append({"event": event, **fields}))
    return found


def an_optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.1)


def at(step: int, first: list[float], last: list[float], changes: int = 5, starts: int = 1) -> Progress:
    rates = RateInfo(tuple(first), tuple(last), changes)
    return Progress(rank=1, row=Row(step, step), rates=rates, num_starts=starts)


def cosine(optimizer: torch.optim.Optimizer) -> object:
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


def test_a_schedule_that_begins_anew_is_stopped_with_what_to_do() -> None:
    optimizer = an_optimizer(0.5, 0.1)
    schedule = cosine(optimizer)
    message = r"rank 1 resumes at training step 7, but its learning rate restarts at 0\.1 .* 0\.05"
    with pytest.raises(UsageError, match=message) as stopped:
        Restarted([optimizer]).look(at(7, [0.5, 0.1], [0.5, 0.05], changes=1), None)
    assert "(CosineAnnealingLR)" in stopped.value.message and schedule is not None
    assert "session.state(" in stopped.value.fix and "PS_WORKER__ACCEPT_RESTARTED_SCHEDULE" in stopped.value.fix


def test_a_rate_that_its_own_counter_makes_is_stopped_without_a_scheduler() -> None:
    with pytest.raises(UsageError):
        Restarted([an_optimizer(0.1)]).look(at(7, [0.1], [0.05], changes=2), None)


@pytest.mark.parametrize(
    ("description", "rate", "progress", "num_said"),
    [
        ("a new rank", 0.1, at(0, [], []), 0),
        ("a constant rate", 0.1, at(7, [0.1], [0.1], 0), 1),
        ("changed by hand, once, in the run", 0.1, at(7, [0.1], [0.02], 1), 1),
        ("changed by hand before the resume", 0.03, at(7, [0.1], [0.05]), 1),
        ("goes on", 0.05, at(7, [0.1], [0.05]), 1),
        ("a server that knows no rates", 0.1, at(7, [], []), 1),
    ],
)
def test_who_is_not_stopped(warnings: list, description: str, rate: float, progress: Progress, num_said: int) -> None:
    memory = Restarted([an_optimizer(rate)])
    memory.look(progress, None)
    assert [warning["event"] for warning in warnings] == ["nothing_registered"] * num_said


@pytest.mark.parametrize(
    ("declares", "num_said"), [("has_state", 0), ("knows_step", 1), ("has_epochs", None), ("accepts", 0)]
)
def test_what_a_script_has_declared(warnings: list, declares: str, num_said: int | None) -> None:
    optimizer = an_optimizer(0.1)
    schedule = cosine(optimizer)
    memory = Restarted([optimizer], accepts=declares == "accepts")
    if declares != "accepts":
        setattr(memory, declares, True)
    if num_said is None:
        with pytest.raises(UsageError):
            memory.look(at(7, [0.1], [0.05]), None)
        return
    memory.look(at(7, [0.1], [0.05]), None)
    assert len(warnings) == num_said and schedule is not None
    if warnings:
        assert "its learning rate restarts at 0.1 instead of 0.05" in warnings[0]["meaning"]


def test_a_live_process_that_the_run_moves_is_warned_once(warnings: list) -> None:
    memory = Restarted([an_optimizer(0.1)])
    memory.look(at(0, [], []), None)
    memory.look(at(1, [], [], starts=2), 1)  # let go and back, where it was
    assert not warnings
    memory.look(at(4, [0.2], [0.1], starts=3), 10)
    memory.look(at(1, [0.2], [0.1], starts=4), 5)
    assert len(warnings) == 1 and "moved this process by -6 training steps" in warnings[0]["meaning"]


def test_schedulers_of_any_kind_are_seen_on_what_shares_the_groups() -> None:
    item, other = an_optimizer(0.1), an_optimizer(0.1)
    wrapper = an_optimizer(0.1)
    wrapper.param_groups = item.param_groups
    made = [lr_scheduler.ReduceLROnPlateau(wrapper), lr_scheduler.StepLR(item, 3), lr_scheduler.LinearLR(other)]
    assert sorted(schedulers_of([item])) == ["ReduceLROnPlateau", "StepLR"] and len(made) == 3
