"""The session's optimizer as torch sees it: loaded, saved, scheduled, it is the optimizer it was made from."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paramserver.common.config.schema import SlowdownConfig
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Row
from paramserver.worker.session import Length, Progress
from paramserver.worker.training.optimizer import ExchangeOptimizer, Steps
from paramserver.worker.training.position.data import DataPosition
from paramserver.worker.training.position.memory import Memory
from paramserver.worker.training.slowdown import Slowdown


class Run:
    """What a strategy is to an optimizer, in a run of many local steps."""

    def __init__(self, kind: ContributionKind) -> None:
        self.kind = kind
        self.settings = SimpleNamespace(steps=100, mode="any")
        self.progress = Progress(run="this", steps_left=100, local_steps=100)

    def optimizer_state(self, parameters: Any) -> dict[int, Any]:
        return {}

    def before_step(self, num_samples, losses, groups) -> None:
        pass

    def went_on(self) -> None:
        pass

    note = pause = restore = went_on

    def contribute(self, outgoing: Any, parameters: Any = None) -> None:
        self.progress.steps_left = 100


def optimizer_of(
    model: nn.Module, kind: ContributionKind = ContributionKind.WEIGHTS, of: type[Run] = Run, make: Any = None
) -> tuple[ExchangeOptimizer, torch.optim.Optimizer]:
    inner = make(model.parameters()) if make is not None else torch.optim.Adam(model.parameters(), lr=0.1)
    run = of(kind)
    data = DataPosition(run, [inner], Length())  # type: ignore[arg-type]
    steps = Steps(Memory(data), Slowdown(SlowdownConfig(), 0, 0))
    return ExchangeOptimizer(inner, steps), inner


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


def copy_of(model: nn.Module) -> nn.Module:
    copy = nn.Linear(3, 2)
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("who", ["outer", "inner"])
def test_moments_that_are_loaded_are_gone_on_with_where_this_process_steps(who: str) -> None:
    model = nn.Linear(3, 2)
    plain_model = copy_of(model)
    plain = torch.optim.Adam(plain_model.parameters(), lr=0.1)
    optimizer, inner = optimizer_of(model)
    for item, stepped in ((plain_model, plain), (model, optimizer)):
        train(item, stepped, 3)
        saved = stepped.state_dict()
        train(item, stepped, 2)
        (inner if who == "inner" and stepped is optimizer else stepped).load_state_dict(saved)
        torch.optim.lr_scheduler.StepLR(stepped, step_size=1, gamma=0.5).step()
        train(item, stepped, 3)
    assert torch.equal(model.weight, plain_model.weight)  # type: ignore[arg-type]
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups


def test_where_the_server_steps_only_hyperparameters_are_loaded() -> None:
    elsewhere = nn.Linear(3, 2)
    other = torch.optim.Adam(elsewhere.parameters(), lr=0.02)
    train(elsewhere, other, 2)
    optimizer, inner = optimizer_of(nn.Linear(3, 2), ContributionKind.GRADIENT)
    optimizer.load_state_dict(other.state_dict())
    assert (inner.param_groups[0]["lr"], len(inner.state)) == (0.02, 0)
    assert optimizer.state_dict()["paramserver"] == {"run": "this", "steps": 0}


FIRST_STEPS = """
import sys
from paramserver.common.tensors.optimizers import without_compiler
from paramserver.tests.worker.test_optimizer import *
without_compiler()  # as ps-worker does
model = nn.Linear(3, 2)
plain = copy_of(model)
optimizer, _ = optimizer_of(model)
train(model, optimizer, 3)
assert "torch._dynamo" not in sys.modules, "the first step imports the compiler"
train(plain, torch.optim.Adam(plain.parameters(), lr=0.1), 3)
assert "torch._dynamo" in sys.modules, "torch's own does not import it: nothing to go round"
assert torch.equal(model.weight, plain.weight)
"""


def test_the_first_step_does_not_import_the_compiler() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST_STEPS], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


SEEN = """
import sys
from torch.optim.optimizer import register_optimizer_step_post_hook
from paramserver.common.tensors.optimizers import without_compiler
from paramserver.tests.worker.test_optimizer import *
without_compiler()

class Own(torch.optim.Adam):
    def step(self, closure=None):
        seen.append(1)

ways = {
    "replaced": lambda inner: setattr(inner, "step", lambda closure=None: seen.append(1)),
    "another class": lambda inner: setattr(inner, "__class__", Own),
    "hooked before": lambda inner: inner.register_step_pre_hook(lambda *_: seen.append(1)),
    "hooked after": lambda inner: inner.register_step_post_hook(lambda *_: seen.append(1)),
    "all hooked": lambda inner: register_optimizer_step_post_hook(lambda one, *_: one is inner and seen.append(1)),
}
for name, look in ways.items():
    model, seen = nn.Linear(3, 2), []
    optimizer, inner = optimizer_of(model)
    look(inner)
    train(model, optimizer, 2)
    assert seen == [1, 1], (name, seen)
"""


def test_who_looks_at_the_inner_step_sees_it() -> None:
    """In a process where nothing is compiled, where torch's wrapper of it is gone round."""
    ran = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


# ---- test slowdown --------------------------------------------------------------------------------------

# Delays that make equal machines unequal: the same for the same seed, and of the size they say.


def delays(rank: int = 0, seed: int = 0, compute_s: float = 0.1, count: int = 200, **config: Any) -> list[float]:
    slowdown = Slowdown(SlowdownConfig(**config), rank, seed)
    return [slowdown.delay_s(step, compute_s) for step in range(1, count + 1)]


def test_by_default_nothing_is_added() -> None:
    assert set(delays()) == {0.0}


def test_jitter_is_uniform_from_nothing_to_its_size() -> None:
    found = delays(base_s=1.0, jitter_s=0.5, count=2000)
    assert 1.0 <= min(found) < 1.02
    assert 1.48 < max(found) <= 1.5
    assert sum(found) / len(found) == pytest.approx(1.25, abs=0.02)


@pytest.mark.parametrize(
    "config", [{"jitter_s": 0.5}, {"straggler_probability": 0.3}, {"jitter_s": 0.1, "straggler_probability": 0.5}]
)
def test_the_same_seed_and_rank_give_the_same_delays(config: dict[str, float]) -> None:
    runs = {(rank, seed): delays(rank, seed, **config) for rank, seed in itertools.product(range(3), range(3))}
    assert runs == {(rank, seed): delays(rank, seed, **config) for rank, seed in runs}
    assert len({tuple(run) for run in runs.values()}) == len(runs), "others give others"


@given(factor=st.floats(1, 20), base_s=st.floats(0, 2), compute_s=st.floats(0, 5))
def test_a_slow_step_takes_factor_times_the_step(factor: float, base_s: float, compute_s: float) -> None:
    """Added delays included: compute and delay together are factor times compute and base."""
    config = SlowdownConfig(base_s=base_s, straggler_rank=1, straggler_every=3, straggler_factor=factor)
    slowdown = Slowdown(config, 1, 0)
    for step in range(1, 10):
        expected = (factor if step % 3 == 0 else 1.0) * (compute_s + base_s)
        assert compute_s + slowdown.delay_s(step, compute_s) == pytest.approx(expected)


def test_random_stragglers_come_with_their_probability() -> None:
    found = delays(straggler_probability=0.2, straggler_factor=5.0, count=3000)
    assert {round(delay, 9) for delay in found} == {0.0, 0.4}
    assert sum(delay > 0 for delay in found) / 3000 == pytest.approx(0.2, abs=0.03)
    assert set(delays(straggler_probability=1.0, straggler_factor=5.0)) == {0.4}


def test_what_is_slow_is_a_training_step_also_where_a_contribution_has_several() -> None:
    """A rank that comes back after two contributions of four steps each goes on with its ninth step."""
    seen: list[int] = []
    slowdown = SimpleNamespace(delay_s=lambda step, compute_s: seen.append(step) or 0.0)
    progress = Progress(row=Row(2, 8), local_steps=4, steps_left=4)
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=0.1)
    strategy = Run(ContributionKind.WEIGHTS)
    strategy.progress = progress
    optimizer = ExchangeOptimizer(inner, Steps(Memory(DataPosition(strategy, [inner], Length())), slowdown))
    optimizer.step()
    optimizer.step()
    assert seen == [9, 10]
