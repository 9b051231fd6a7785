"""A process that takes a rank, wherever the one before was killed, does what that one would have done: which batches,
which state, at which step and epoch. The run is one of one rank whose weights nobody changes."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn
from torch.utils.data import TensorDataset

from paramserver.common.config.schema import Config, RunConfig, SlowdownConfig
from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.wire.records import Position
from paramserver.worker.conversation.messages import Begun, Settings
from paramserver.worker.session import Length, Progress
from paramserver.worker.tensors.packed import pack, unpack
from paramserver.worker.training.alone import AloneSession
from paramserver.worker.training.optimizer import ExchangeOptimizer, Steps
from paramserver.worker.training.position.data import DataPosition
from paramserver.worker.training.position.memory import Memory
from paramserver.worker.training.session import Session
from paramserver.worker.training.slowdown import Slowdown

from ..records import reply_of
from .test_optimizer import Run as StrategyOfNothing

STEPS, LOCAL = 14, 2


class Run:
    """The server: what came with each contribution, and how many batches it was of."""

    def __init__(self, local_steps: int) -> None:
        self.local_steps, self.came, self.batches = local_steps, {}, {0: 0}

    def start(self, progress: Progress, number: int) -> None:
        """As a reply START to a rank of which so many contributions count."""
        self.reply(progress, number)
        progress.num_starts += 1
        progress.row = progress.row._replace(batches=self.batches[number])

    def reply(self, progress: Progress, number: int) -> None:
        done = number * self.local_steps
        local_steps = max(0, min(self.local_steps, STEPS - done))
        progress.replied(reply_of(number, number, local_steps, training_steps=done, run_steps=STEPS))


class Strategy(StrategyOfNothing):
    """Of one process. `goes_back` at a contribution: then the run has gone back to so many."""

    def __init__(self, run: Run, number: int, goes_back: tuple[int, int] = (0, 0)) -> None:
        self.run, self.goes_back = run, goes_back
        self.kind, self.progress = ContributionKind.WEIGHTS, Progress(run="this")
        self.settings = Settings("any", self.kind, 1, STEPS, batch_size=4, seed=0)
        self.started_at = number
        run.start(self.progress, number)

    def begun(self) -> Any:
        return self.run.came.get(self.started_at)

    def replay(self, position: Position) -> None:
        self.progress.replay(position)

    def replayed(self) -> int:
        return self.progress.replayed()

    def contribute(self, outgoing: Any, parameters: Any = None) -> None:
        number, contribution = self.progress.next_number, outgoing.contribution
        began = contribution.position
        self.run.came[number] = None if began is None else Begun(began, outgoing.state)
        self.run.batches[number] = self.run.batches[number - 1] + contribution.counts.num_batches
        if number == self.goes_back[0]:
            self.started_at, self.goes_back = self.goes_back[1], (0, 0)
            self.run.start(self.progress, self.started_at)
        else:
            self.run.reply(self.progress, number)


class OneSession(Session):
    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self.strategy = strategy
        super().__init__(Config())
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        self._memory = Memory(DataPosition(strategy, [inner], Length()))  # type: ignore[arg-type]
        steps = Steps(self._memory, Slowdown(SlowdownConfig(), 0, 0), scaling=self._scaling)
        self.opt = ExchangeOptimizer(inner, steps)
        self._is_closed = True  # nothing is to be left at exit

    def _open(self, may_overlap: bool) -> Any:
        return self.strategy

    @property
    def step(self) -> int:
        return self.strategy.progress.position

    def is_over(self) -> bool:
        return self.is_done


class Killed(Exception):
    pass


def marked(batches: Any, is_ahead: bool) -> Any:
    """Each batch, with whether it is the last one of the loop."""
    if not is_ahead:
        for batch in batches:
            yield batch, not batches.remaining
        return
    loop = iter(batches)
    if (fetched := next(loop, None)) is None:
        return
    for batch in loop:
        yield fetched, False
        fetched = batch
    yield fetched, True


def script(strategy: Strategy, way: dict[str, Any], log: list[Any], kill_at: int = 10**9) -> None:
    """A loop of some shape, which tells each batch with all that it depends on. `kill_at`: before so many of its
    batches."""
    model = nn.Linear(1, 1)
    session = OneSession(strategy, model)
    by_step = torch.optim.lr_scheduler.ExponentialLR(session.opt, 0.9)
    by_epoch = torch.optim.lr_scheduler.StepLR(session.opt, step_size=1, gamma=0.5)
    noise = torch.Generator().manual_seed(1)
    session.state(by_step=by_step, by_epoch=by_epoch, noise=noise)
    data = TensorDataset(torch.arange(way["num_samples"]).float().unsqueeze(1))
    stated = {"accumulate": way["accumulate"], "prefetch": int(way["is_ahead"]), "shuffle": way["shuffle"]}
    stated["epochs"] = 1 if way["has_epochs"] else None
    outside = session.shard(data, 4, **stated) if way["is_outside"] else None
    num = 0
    for epoch in session.epochs(100) if way["has_epochs"] else [0]:
        batches = session.shard(data, 4, **stated) if outside is None else outside
        num_in_step = 0
        for (rows,), is_last in marked(batches, way["is_ahead"]):
            if num == kill_at:
                raise Killed
            num += 1
            seen = (
                session.step, epoch, session.epoch, tuple(rows.flatten().tolist()), session.opt.param_groups[0]["lr"],
            )  # fmt: skip
            log.append((*seen, float(torch.rand((), generator=noise))))
            model(rows).sum().backward()
            num_in_step += 1
            if num_in_step == way["accumulate"] or is_last:
                session.opt.step()
                by_step.step()
                num_in_step = 0
        by_epoch.step()
    assert session.step == STEPS
    log.append(("end", by_step.get_last_lr(), by_epoch.last_epoch))


WAYS = st.fixed_dictionaries(
    {
        "num_samples": st.integers(9, 21), "shuffle": st.booleans(), "is_outside": st.booleans(),
        "has_epochs": st.booleans(), "is_ahead": st.booleans(), "accumulate": st.integers(1, 2),
    }
)  # fmt: skip


def of_step(log: list[Any], step: int) -> list[Any]:
    """From the first batch of a step on."""
    return [item for item in log if item[0] == "end" or item[0] >= step]


# The whole run is over, and the loop asks for a batch before it uses the one at hand.
OVER = {"num_samples": 19, "shuffle": True, "is_outside": False, "has_epochs": False, "is_ahead": True, "accumulate": 2}


@given(way=WAYS, local_steps=st.integers(1, LOCAL), kill_at=st.integers(1, 2 * STEPS), counted=st.floats(0, 1))
@example(way=OVER, local_steps=1, kill_at=2 * STEPS, counted=1.0)
@example(way={**OVER, "has_epochs": True, "accumulate": 1}, local_steps=1, kill_at=2 * STEPS, counted=1.0)
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_whoever_takes_a_rank_does_what_the_one_before_would_have_done(way, local_steps, kill_at, counted) -> None:
    whole: list[Any] = []
    script(Strategy(Run(local_steps), 0), way, whole)
    run, first = Run(local_steps), []
    with contextlib.suppress(Killed):
        script(Strategy(run, 0), way, first, kill_at)
    number = round(counted * max(run.came, default=0))  # a snapshot may be older
    second: list[Any] = []
    script(Strategy(run, number), way, second)
    assert second == of_step(whole, max(0, number - 1) * local_steps)


@given(way=WAYS, local_steps=st.integers(1, LOCAL), at=st.integers(1, 7), back=st.floats(0, 1))
@settings(max_examples=25, deadline=None, phases=(Phase.generate,))
def test_a_process_whose_server_goes_back_does_it_again(way, local_steps, at, back) -> None:
    """The server has lost contributions: the script, in the middle of its loops, is what it was when the last one began
    that the server still has. What a loop that fetches ahead has in hand then is void. A loop that has ended cannot go
    back: one that fetches ahead ends before the run's last step (`finish()` says so)."""
    assume(way["has_epochs"] or not way["is_ahead"] or at * local_steps < STEPS)
    whole: list[Any] = []
    script(Strategy(Run(local_steps), 0), way, whole)
    found: list[Any] = []
    to = round(back * at)
    script(Strategy(Run(local_steps), 0, (at, to)), way, found)
    again = of_step(whole, max(0, to - 1) * local_steps)
    assert found[-len(again) :] == again


def test_batches_of_a_step_that_a_scaler_skipped_are_used_up() -> None:
    """The last contribution was of one batch, and computing it again takes no step: the loop goes on with the next."""
    run = Run(1)
    way = {"num_samples": 12, "shuffle": False, "is_outside": False, "has_epochs": True, "is_ahead": False}
    script(Strategy(run, 0), {**way, "accumulate": 1}, [])
    session = OneSession(Strategy(run, 4), model := nn.Linear(1, 1))
    log = []
    session.state()
    for _ in session.epochs(100):
        for (rows,) in session.shard(TensorDataset(torch.arange(12).float().unsqueeze(1)), 4, shuffle=False):
            log.append((session.step, rows[0].item()))
            model(rows).sum().backward()
            if len(log) != 1:
                session.opt.step()
            else:
                session.skip_step(session.opt)
    assert log[:4] == [(3, 0.0), (4, 4.0), (5, 8.0), (6, 0.0)]


# ---- alone ------------------------------------------------------------------------------------------


def alone(steps: int | None = None) -> tuple[AloneSession, nn.Module, torch.optim.Optimizer]:
    item, model = AloneSession(Config(run=RunConfig(steps=steps))), nn.Linear(1, 1)
    return item, model, item.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))


def test_alone_epochs_end_with_the_data_and_the_run() -> None:
    session, model, optimizer = alone(steps=8)
    assert (session.step, session.epoch, session.resumed) == (0, 0, False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session.state(scheduler=scheduler, rng=True)
    log = []
    for epoch in session.epochs(10):
        batches = session.shard(TensorDataset(torch.zeros(10, 1)), batch_size=4)
        log.append((epoch, len(batches), session.step))
        for number, (rows,) in enumerate(batches):
            if epoch == 1 and number == 1:
                session.skip()
                break  # an epoch may be left early: the next is another one
            model(rows).sum().backward()
            optimizer.step()
            assert session.epoch == epoch
    assert log == [(0, 3, 0), (1, 3, 3), (2, 3, 4), (3, 3, 7)]
    assert session.step == 8 and session.is_done


class Odd:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"held": [self.state]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (object(), "session.state(one=...) is a object, without state_dict()"),
        (Odd(Odd(1)), "'one.held[0]' is of type Odd, and only tensors and JSON travel"),
        (Odd({1, 2}), "'one.held[0]' is of type set"),
        (Odd(torch.eye(2).to_sparse()), "'one.held[0]' is of type Tensor"),
    ],
)
def test_what_is_neither_tensors_nor_json_is_refused_by_name(item: Any, message: str) -> None:
    session = OneSession(Strategy(Run(1), 0), nn.Linear(1, 1))
    with pytest.raises(UsageError) as refused:
        session.state(one=item)
    assert message in refused.value.message and refused.value.fix


def test_state_after_the_first_batch_or_twice_is_a_mistake_that_is_said() -> None:
    session = OneSession(Strategy(Run(1), 0), nn.Linear(1, 1))
    session.state(one=Odd(1))
    with pytest.raises(UsageError, match=r"session.state\(one=...\) was called before"):
        session.state(one=Odd(1))
    next(iter(session.shard(TensorDataset(torch.zeros(10, 1)), 4)))
    with pytest.raises(UsageError, match="after the first batch"):
        session.state(two=Odd(1))


def test_what_does_not_take_its_state_back_is_named() -> None:
    run = Run(1)
    script(Strategy(run, 0), {"num_samples": 9, "shuffle": False, "is_outside": False, "has_epochs": False,
                              "is_ahead": False, "accumulate": 1}, [])  # fmt: skip
    session = OneSession(Strategy(run, 3), nn.Linear(1, 1))
    with pytest.raises(
        UsageError,
        match=r"session.state\(by_step=...\) does not accept the state that the run saved: RuntimeError: Error",
    ):
        session.state(by_step=torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)))


def test_everything_packed_comes_back_as_it_was() -> None:
    shared = torch.arange(6.0)
    values = {
        "numbers": [1, -2.5, float("inf"), True, None, "text", np.float32(0.5), np.int64(3)],
        "nested": {"betas": (0.9, (1, 2)), 7: {"$odd": [1]}, "milestones": Counter({30: 1, 80: 2})},
        "ordered": OrderedDict(b=torch.eye(2, dtype=torch.bfloat16), a=torch.tensor(3)),
        "views": [shared[:3], shared, shared.view(2, 3).t(), shared],
        "empty": {},
    }
    found = unpack(pack(values))
    assert found["numbers"] == values["numbers"] and found["nested"] == values["nested"]
    assert isinstance(found["nested"]["milestones"], Counter) and list(found["ordered"]) == ["b", "a"]
    assert found["ordered"]["b"].dtype is torch.bfloat16
    assert all(torch.equal(view, other) for view, other in zip(found["views"], values["views"], strict=True))
    assert pack(values) == pack(values), "the same is the same bytes"
    with pytest.raises(UsageError, match="cannot be read"):
        unpack(pack(values)[:-3])
    nested = save({"a": torch.zeros(1)}, {"state": "[" * 100_000})
    with pytest.raises(UsageError, match="cannot be read"):
        unpack(nested)
