"""Optimizers as data: which classes a server can run on flat weights, and that nothing is lost in between."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from paramserver.common.errors import Reason, UsageError
from paramserver.common.tensors.optimizers import (
    GroupSpec,
    OptimizerSpec,
    apply_hyperparameters,
    build_optimizer,
    check_arguments,
    check_hyperparameters,
    current_hyperparameters,
    describe_optimizers,
    find_optimizer,
    is_elementwise,
    known_optimizers,
)
from paramserver.common.wire.protocol import optimizer_from_proto, optimizer_to_proto
from paramserver.proto import parameter_server_pb2 as pb

CLASSES = sorted(known_optimizers())
ELEMENTWISE = [name for name in CLASSES if is_elementwise(known_optimizers()[name])]

# Other arguments than torch's defaults: whatever the class takes of these is given.
UNUSUAL: dict[str, Any] = {
    "lr": 0.05, "weight_decay": 0.1, "momentum": 0.8, "nesterov": True, "betas": (0.8, 0.95), "eps": 1e-5,
    "amsgrad": True, "maximize": True, "centered": True, "alpha": 0.7, "rho": 0.8, "etas": (0.4, 1.3),
    "step_sizes": (1e-5, 20.0), "lambd": 1e-3, "t0": 2.0, "momentum_decay": 0.01, "decoupled_weight_decay": True,
    "lr_decay": 0.01, "initial_accumulator_value": 0.3,
}  # fmt: skip


def unusual_arguments(name: str) -> dict[str, Any]:
    accepted = inspect.signature(known_optimizers()[name]).parameters
    return {key: value for key, value in UNUSUAL.items() if key in accepted}


def gradient_of(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Different for every element and step, with both signs and an exact zero now and then."""
    generator = torch.Generator().manual_seed(step)
    gradient = torch.randn(math.prod(shape), generator=generator)
    gradient[step % 3 :: 7] = 0.0
    return gradient.view(shape)


def step_tensors(cls: Any, arguments: dict[str, Any], pieces: list[slice], shape: tuple[int, ...]) -> torch.Tensor:
    """Five steps of `cls` over one tensor, cut into `pieces` of its rows."""
    start = torch.linspace(-2, 2, math.prod(shape)).view(shape)
    tensors = [start[piece].clone() for piece in pieces]
    optimizer = cls(tensors, **arguments)
    for step in range(5):
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.grad = gradient_of(shape, step)[piece].clone()
        optimizer.step()
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def is_elementwise_by_force(cls: Any, arguments: dict[str, Any]) -> bool:
    """A 2-d tensor whole, by rows, in uneven parts and element by element; nothing but elementwise gives the same."""
    cuts = [[slice(0, 6)], [slice(0, 1), slice(1, 6)], [slice(row, row + 1) for row in range(6)]]
    elements = [slice(at, at + 1) for at in range(30)]
    try:
        whole, *others = [step_tensors(cls, arguments, pieces, (6, 5)) for pieces in cuts]
        others.append(step_tensors(cls, arguments, elements, (30,)))
    except Exception:
        return False
    return all(torch.allclose(whole, other, rtol=1e-6, atol=1e-7) for other in others)


# ---- which classes -------------------------------------------------------------------------------


def test_every_class_of_torch_is_looked_at() -> None:
    """A new class in torch shows up here; Muon, Adafactor, LBFGS and SparseAdam are not elementwise."""
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad"} <= set(ELEMENTWISE)
    assert {"lbfgs", "sparseadam"} <= set(CLASSES) - set(ELEMENTWISE)
    assert "optimizer" not in CLASSES


@pytest.mark.parametrize("name", CLASSES)
def test_elementwise_means_what_it_says(name: str) -> None:
    """LBFGS needs a closure, Adafactor and Muon look at a whole tensor."""
    cls = known_optimizers()[name]
    assert is_elementwise(cls) == is_elementwise_by_force(cls, {"lr": 0.1})


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_also_with_every_argument_set(name: str) -> None:
    """The trial runs with torch's defaults; no argument may make the class look at more than one element."""
    assert is_elementwise_by_force(known_optimizers()[name], unusual_arguments(name))


# ---- names and arguments -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "SGD", "AdamW", "RMSprop"])
def test_names_in_any_case(name: str) -> None:
    assert find_optimizer(name).__name__.lower() == name.lower()


@pytest.mark.parametrize(
    ("wrong", "fix"), [("adamm", "did you mean 'adam'?"), ("sdg", "did you mean 'sgd'?"), ("", "known:")]
)
def test_an_unknown_name(wrong: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_optimizer(wrong)
    assert caught.value.message == f"unknown optimizer '{wrong}'"
    assert caught.value.fix.startswith(fix)
    assert caught.value.reason is None


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(ELEMENTWISE)))
def test_a_class_a_server_cannot_run_is_refused_with_those_it_can(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_optimizer(name)
    assert caught.value.reason is Reason.OPTIMIZER_UNSUPPORTED
    assert all(usable in caught.value.fix for usable in ELEMENTWISE)
    assert f" {name}," not in caught.value.fix


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("adam", {"lr": 0.1, "weigth_decay": 0.1}, "has no argument 'weigth_decay', did you mean 'weight_decay'?"),
        ("sgd", {"lr": 0.1, "betas": [0.9, 0.99]}, "has no argument 'betas'"),
        ("sgd", {"lr": 0.1, "fused": True}, "has no argument 'fused'"),
        ("sgd", {"lr": 0.1, "params": []}, "has no argument 'params'"),
        ("sgd", {"lr": -1.0}, "Invalid learning rate"),
        ("sgd", {"lr": 0.1, "nesterov": True}, "Nesterov momentum requires a momentum"),
        ("adam", {"lr": 0.1, "betas": [0.9, 1.5]}, "Invalid beta parameter at index 1"),
        ("adam", {"lr": 0.1, "betas": 0.9}, "optimizer 'adam': "),
        ("adam", {"lr": 0.1, "betas": [0.9]}, "optimizer 'adam': "),
        ("adam", {"lr": 0.1, "betas": []}, "optimizer 'adam': "),
        ("adam", {"lr": 0.1, "betas": ["a", "b"]}, "optimizer 'adam': "),
        ("adam", {"lr": "fast"}, "optimizer 'adam': "),
        ("adam", {"lr": None}, "optimizer 'adam': "),
        ("rprop", {"lr": 0.1, "etas": [0.5]}, "optimizer 'rprop': "),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_arguments(name, arguments)
    assert says in f"{caught.value.message}, {caught.value.fix}" and caught.value.exit_code == 2


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_argument_a_class_has_may_be_given(name: str) -> None:
    given = unusual_arguments(name).items()
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in given}
    assert len(arguments) >= 2
    assert check_arguments(name, arguments) is known_optimizers()[name]


# ---- describe, send, build -----------------------------------------------------------------------


def two_groups() -> tuple[list[torch.nn.Parameter], dict[int, str]]:
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (7, 1, 12)]
    return parameters, {id(parameter): f"layer.{index}" for index, parameter in enumerate(parameters)}


def over_the_wire(spec: OptimizerSpec) -> OptimizerSpec:
    return optimizer_from_proto(pb.Optimizer.FromString(optimizer_to_proto(spec).SerializeToString()))


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("is_unusual", [False, True])
def test_what_is_described_sent_and_built_steps_the_same(name: str, is_unusual: bool) -> None:
    parameters, names = two_groups()
    arguments = unusual_arguments(name) if is_unusual else {"lr": 0.05}
    cls, of_last = known_optimizers()[name], {"lr": 0.02, "weight_decay": 0.01}
    theirs = cls([{"params": parameters[:2]}, {"params": parameters[2:], **of_last}], **arguments)
    spec = describe_optimizers([theirs], names)
    assert spec.name == cls.__name__
    assert [group.tensors for group in spec.groups] == [("layer.0", "layer.1"), ("layer.2",)]
    received = over_the_wire(spec)
    assert received.differences(spec) == spec.differences(received) == []
    copies = {names[id(parameter)]: torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters}
    ours = build_optimizer(
        received.name,
        [{"params": [copies[n] for n in group.tensors], **group.hyperparameters} for group in received.groups],
    )
    assert type(ours) is cls
    for step in range(4):
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient_of((parameter.numel(),), 10 * step + index)
            copies[f"layer.{index}"].grad = parameter.grad.clone()
        theirs.step()
        ours.step()
    for parameter in parameters:
        torch.testing.assert_close(copies[names[id(parameter)]], parameter, rtol=2e-6, atol=2e-6)
    again = [current_hyperparameters(group) for group in ours.param_groups]
    # `eta`, `ax` and the like of ASGD live in the state; what is in the groups must be what was sent.
    for sent, built in zip(spec.groups, again, strict=True):
        assert {key: built[key] for key in sent.hyperparameters} == sent.hyperparameters


@pytest.mark.parametrize("name", CLASSES)
def test_any_optimizer_of_torch_can_be_described(name: str) -> None:
    """Also those the server cannot run: in localsgd they run in the worker, and every worker says what it has."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = known_optimizers()[name]([parameter])
    spec = describe_optimizers([optimizer], {id(parameter): "w"})
    assert spec.name.lower() == name
    assert over_the_wire(spec).differences(spec) == []


def test_a_tensor_that_is_no_parameter_of_the_model() -> None:
    stranger = torch.nn.Parameter(torch.zeros(2, 3))
    parameters, names = two_groups()
    optimizer = torch.optim.SGD([*parameters, stranger], lr=0.1)
    message = r"1 tensors that are not parameters of the model, the first of shape \(2, 3\)"
    with pytest.raises(UsageError, match=message):
        describe_optimizers([optimizer], names)


def test_fused_where_torch_has_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    assert build_optimizer("adam", [{"params": [parameter]}]).param_groups[0]["fused"] is True
    assert "fused" not in build_optimizer("rprop", [{"params": [parameter]}]).param_groups[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_float_dtype_steps(name: str, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = build_optimizer(name, [{"params": [parameter], "lr": 0.1}])
    parameter.grad = torch.ones(5, dtype=dtype)
    optimizer.step()
    assert parameter.isfinite().all()
    # Adadelta's first step is 3e-4: too little for the eight bits of bfloat16.
    assert (parameter < 1).all() or (name == "adadelta" and dtype in (torch.bfloat16, torch.float16))


# ---- comparing -----------------------------------------------------------------------------------


def spec_of(name: str = "SGD", tensors: tuple[str, ...] = ("w",), **hyperparameters: Any) -> OptimizerSpec:
    return OptimizerSpec(name, (GroupSpec(tensors, hyperparameters),))


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        (spec_of(lr=0.1, momentum=0.9), []),
        (spec_of("Adam", lr=0.1, momentum=0.9), ["different optimizer: expected SGD, got Adam"]),
        (spec_of(lr=0.2, momentum=0.9), ["group 0: expected lr=0.1, got 0.2"]),
        (spec_of(lr=0.1), ["group 0: expected momentum=0.9, got None"]),
        (spec_of(lr=0.1, momentum=0.9, dampening=0.5), ["group 0: expected dampening=None, got 0.5"]),
        (spec_of(tensors=("v",), lr=0.1, momentum=0.9), ["different tensors of group 0"]),
        (OptimizerSpec("SGD", ()), ["different number of groups: expected 1, got 0"]),
        (replace(spec_of(lr=0.1, momentum=0.9), reduction="sum"), ["different reduction: expected mean, got sum"]),
    ],
)
def test_differences_are_sentences(other: OptimizerSpec, differences: list[str]) -> None:
    assert spec_of(lr=0.1, momentum=0.9).differences(other) == differences


# ---- schedulers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=10),
        partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.5, cycle_momentum=True),
        partial(torch.optim.swa_utils.SWALR, swa_lr=0.01),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedulers_bookkeeping_is_no_hyperparameter(scheduler: Any) -> None:
    """What a scheduler adds to a group is not compared and not sent; what it changes is sent."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    before = current_hyperparameters(optimizer.param_groups[0])
    schedule = scheduler(optimizer)
    optimizer.step()
    schedule.step()
    after = current_hyperparameters(optimizer.param_groups[0])
    assert after.keys() == before.keys()
    assert after["lr"] == optimizer.param_groups[0]["lr"] != before["lr"]


def test_current_values_reach_the_servers_group() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer("adam", [{"params": [parameter], "lr": 0.1}])
    group = optimizer.param_groups[0]
    values = {"lr": 0.01, "betas": [0.5, 0.6], "unheard_of": 1.0, "params": [], "fused": False, "amsgrad": True}
    apply_hyperparameters(group, values)
    assert (group["lr"], group["betas"], group["fused"], group["amsgrad"]) == (0.01, (0.5, 0.6), True, True)
    assert group["params"] == [parameter]
    assert "unheard_of" not in group


def test_a_tensor_learning_rate_is_a_number() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25))
    assert current_hyperparameters(optimizer.param_groups[0])["lr"] == 0.25


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adamax", "adadelta"])
def test_what_a_class_puts_into_its_groups_itself_is_no_mistake(name: str) -> None:
    optimizer = build_optimizer(name, [{"params": [torch.nn.Parameter(torch.zeros(2))]}], {"lr": 0.1})
    hyperparameters = current_hyperparameters(optimizer.param_groups[0])
    check_hyperparameters(name, hyperparameters)
    check_hyperparameters(name, hyperparameters | {"lr": 0.05}, hyperparameters)


def test_numbers_may_change_and_nothing_else() -> None:
    def spec(name: str = "Adam", tensors: tuple[str, ...] = ("w",), **values: Any) -> OptimizerSpec:
        settings = {"lr": 0.1, "betas": [0.9, 0.99], "amsgrad": False, **values}
        return OptimizerSpec(name, (GroupSpec(tensors, settings), GroupSpec(("b",), settings)))

    assert spec().new_numbers(spec()) == []
    changes = [("betas", [0.9, 0.99], [0.8, 0.99]), ("lr", 0.1, 0.2)]
    assert spec().new_numbers(spec(lr=0.2, betas=[0.8, 0.99])) == changes
    others = (spec("AdamW"), spec(tensors=("w", "v")), spec(amsgrad=True), spec(betas=[0.9]), spec(more=1.0))
    assert [spec().new_numbers(other) for other in others] == [None] * 5
    assert spec().new_numbers(replace(spec(), reduction="sum")) is None
