"""What a server would not do of an optimizer is refused by name; the one that returns has what those of torch have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paramserver.common.errors import UsageError
from paramserver.common.kinds import ContributionKind
from paramserver.common.tensors.optimizers import check_is_plain
from paramserver.tests.worker.test_optimizer import Run, optimizer_of, train
from paramserver.worker.tensors.transfer import ModelTensors


class Lion(torch.optim.Optimizer):
    """Of no library, without a constructor of torch's, and with a step that takes no closure."""

    def __init__(self, parameters) -> None:
        self.param_groups, self.state, self.mode = [{"params": list(parameters), "lr": 0.1}], {}, "train"

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=self.param_groups[0]["lr"])

    def eval(self) -> None:
        self.mode = "eval"


class Adam(torch.optim.Adam):
    """A namesake."""


def adam(**options) -> torch.optim.Adam:
    return torch.optim.Adam(nn.Linear(3, 2).parameters(), **options)


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def patched(optimizer: torch.optim.Optimizer, name: str, wrap=lambda method: lambda *args: method(*args)):
    setattr(optimizer, name, wrap(getattr(optimizer, name)))
    return optimizer


def patched_then_scheduled() -> torch.optim.Optimizer:
    optimizer = adam()
    optimizer.step = (lambda self, closure=None: None).__get__(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def hooked(register: str) -> torch.optim.Optimizer:
    optimizer = adam()
    getattr(optimizer, register)(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lion(nn.Linear(3, 2).parameters()), "Lion is not a class of torch.optim"),
        (lambda: Adam(nn.Linear(3, 2).parameters()), "is not torch.optim.Adam, which the server would step"),
        (lambda: patched(adam(), "step"), "a replaced method step()"),
        (lambda: patched(adam(), "zero_grad"), "a replaced method zero_grad()"),
        (patched_then_scheduled, "a replaced method step()"),
        (lambda: hooked("register_step_pre_hook"), "a step pre hook"),
        (lambda: hooked("register_step_post_hook"), "a step post hook"),
        (lambda: hooked("register_state_dict_post_hook"), "a state dict post hook"),
        (lambda: stepped(adam()), "moments of earlier steps"),
        (lambda: stepped(torch.optim.SGD(nn.Linear(3, 2).parameters(), momentum=0.9)), "moments of earlier steps"),
    ],
)
def test_what_a_server_would_not_do_is_refused_by_name(make, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_is_plain(make(), "sync")
    assert words in refused.value.message
    assert "--mode localsgd, diloco or allreduce" in refused.value.fix


def test_a_class_whose_step_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, closure=None: None)
    with pytest.raises(UsageError, match="a replaced method step"):
        check_is_plain(adam(), "sync")


def test_torchs_own_additions_are_known() -> None:
    scheduled = adam()
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(scheduled, 1)
    plain = torch.optim.SGD(nn.Linear(3, 2).parameters())
    for optimizer in (scheduled, torch.optim.Adagrad(nn.Linear(3, 2).parameters()), stepped(plain)):
        check_is_plain(optimizer, "sync")


class Kept(Run):
    """A run whose server has moments."""

    def optimizer_state(self, parameters):
        return {index: {"exp_avg": torch.ones_like(item)} for index, item in enumerate(parameters)}


def test_state_is_the_servers_where_it_steps_and_changes_of_it_are_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer, inner = optimizer_of(model, ContributionKind.GRADIENT, Kept)
    train(model, optimizer, 1)
    assert optimizer.state[model.weight]["exp_avg"].tolist() == [[1.0] * 3] * 2
    assert len(optimizer.state) == 2 and not inner.state
    with pytest.raises(UsageError, match="the server keeps it"):
        optimizer.state = {}
    for parameter, state in optimizer.state.items():  # as trainers do at their end
        optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
    with pytest.raises(UsageError, match="the server keeps it"):
        optimizer.state[model.weight] = {"exp_avg": torch.zeros(2, 3)}
    optimizer.state[model.weight]["exp_avg"].zero_()
    with pytest.raises(UsageError, match="the server keeps it"):
        optimizer.step()


def test_other_attributes_reach_the_optimizer_in_the_worker_and_are_one_sentence_elsewhere() -> None:
    model = nn.Linear(3, 2)
    optimizer, inner = optimizer_of(model, make=Lion)
    optimizer.eval()
    assert inner.mode == optimizer.mode == "eval"
    train(model, optimizer, 2)
    optimizer.state = state = {"of": "the script"}
    assert inner.state is state
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    elsewhere, _ = optimizer_of(nn.Linear(3, 2), ContributionKind.GRADIENT)
    assert not hasattr(elsewhere, "eval") and not hasattr(optimizer, "first_step")
    with pytest.raises(UsageError, match="Adam has no attribute 'eval'"):
        elsewhere.eval()
    elsewhere.inner.eval = lambda: None
    with pytest.raises(UsageError, match="has no effect in a run in which the server runs"):
        elsewhere.eval()


def test_an_optimizer_within_the_optimizer_is_not_stepped_alone() -> None:
    model = nn.Linear(3, 2)

    class Sharp(torch.optim.SGD):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, lr=0.1)
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)

        def second_step(self) -> None:
            self.base.step()

        def step(self, closure=None):
            self.second_step()

    optimizer, _ = optimizer_of(model, make=Sharp)
    train(model, optimizer, 1)
    with pytest.raises(UsageError, match="the run would not see it"):
        optimizer.second_step()


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data.t()
    return model


def of_one_buffer(*ends: tuple[int, int]) -> nn.Module:
    buffer, model = torch.arange(64.0).view(8, 8), nn.Module()
    for index, (first, end) in enumerate(ends):
        model.register_parameter(f"p{index}", nn.Parameter(buffer[:, first:end]))
    return model


def with_buffer() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("first", model.weight.data[0])
    return model


def expanded() -> nn.Module:
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(torch.zeros(1).expand(4))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (tied_by_data, "'0.weight' and '1.weight' share memory"),
        (lambda: of_one_buffer((0, 5), (4, 8)), "'p0' and 'p1' share memory"),
        (with_buffer, "share memory"),
        (expanded, "parameter 'bias' is expanded"),
    ],
)
def test_parameters_that_share_memory_are_refused(make, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ModelTensors(make())


def test_tensors_that_only_lie_in_one_memory_are_taken() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert len(ModelTensors(tied).layout.entries) == 3
    assert len(ModelTensors(of_one_buffer((0, 4), (4, 8))).layout.entries) == 2
    frozen = tied_by_data()
    frozen[0].weight.requires_grad_(False)
    frozen[1].weight.requires_grad_(False)
    assert len(ModelTensors(frozen).layout.entries) == 4
