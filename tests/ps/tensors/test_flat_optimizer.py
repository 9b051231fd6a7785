"""The optimizer over flat weights, by itself: parameters, bits, state, new memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.common.tensors.layout import FlatRun, Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.tensors.flat_optimizer import FlatOptimizer, windows_of

# No number of elements is a multiple of 16; weights and biases are in groups of their own.
SHAPES = {"w0": (7, 9), "b0": (7,), "w1": (5, 7), "b1": (5,), "w2": (3, 37)}
GROUPS = (("w0", "w1", "w2"), ("b0", "b1"))
LAYOUT = Layout([TensorSpec(name, Kind.PARAMETER, "float32", shape) for name, shape in SHAPES.items()])
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 0.1}), ("AdamW", {"lr": 0.1, "weight_decay": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1}), ("Adagrad", {"lr": 0.1}), ("RMSprop", {"lr": 0.01}),
]  # fmt: skip


def payload_of(seed: int, layout: Layout = LAYOUT) -> torch.Tensor:
    payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        view.copy_(torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, spec.name)))))
    return payload


def made(name: str, hyperparameters: dict[str, Any], weights: torch.Tensor) -> FlatOptimizer:
    groups = tuple(GroupSpec(names, hyperparameters) for names in GROUPS)
    return FlatOptimizer(OptimizerSpec(name, groups), LAYOUT, weights, windows_of(LAYOUT), FlatRun.view)


def step(optimizer: FlatOptimizer, seed: int, without: frozenset[str] = frozenset()) -> None:
    optimizer.step(0, payload_of(seed), without)


def test_the_ends_of_all_runs_of_a_group_are_one_parameter() -> None:
    groups = made("Adam", {"lr": 0.1}, payload_of(0)).torch.param_groups
    sizes = [[param.numel() for param in group["params"]] for group in groups]
    assert sizes == [[48, 32, 96, 48], [16]], "whole lines of 16 elements each, then what is left of all"


@pytest.mark.parametrize(("name", "hyperparameters"), OPTIMIZERS)
def test_a_tensor_gets_the_same_bits_whatever_lies_beside_it(name: str, hyperparameters: dict[str, Any]) -> None:
    weights = payload_of(0)
    together = made(name, hyperparameters, weights)
    alone = {}
    for spec in LAYOUT.specs:
        layout = Layout([spec])
        payload = payload_of(0, layout)
        only = OptimizerSpec(name, (GroupSpec((spec.name,), hyperparameters),))
        alone[spec.name] = layout, payload, FlatOptimizer(only, layout, payload, windows_of(layout), FlatRun.view)
    for seed in range(1, 5):
        step(together, seed)
        for layout, _, optimizer in alone.values():
            optimizer.step(0, payload_of(seed, layout))
    for spec, view in LAYOUT.views(weights):
        layout, payload, _ = alone[spec.name]
        assert torch.equal(view, next(item for _, item in layout.views(payload))), spec


@pytest.mark.parametrize(("name", "hyperparameters"), OPTIMIZERS)
def test_another_goes_on_from_its_state_and_in_other_memory(name: str, hyperparameters: dict[str, Any]) -> None:
    """Also where tensors had no gradient in some steps, so that they are not stepped as one any more."""
    weights = payload_of(0)
    first = made(name, hyperparameters, weights)
    for seed, without in ((1, {"w1"}), (2, set()), (3, {"b0", "w1"}), (4, {"w0"})):
        step(first, seed, frozenset(without))
    copied = weights.clone()
    second = made(name, hyperparameters, copied)
    second.set_state(first.state())
    moved = copied.clone()
    second.move(0, moved)
    copied.fill_(0xFF)
    for seed in range(5, 8):
        step(first, seed)
        step(second, seed)
    assert torch.equal(weights, moved)


@pytest.mark.parametrize(("name", "first", "then"), [
    ("RMSprop", {"momentum": 0.0}, {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.0, "centered": False}, {"momentum": 0.5, "centered": True}),
    ("Adam", {"amsgrad": False}, {"amsgrad": True}),
    ("SGD", {"momentum": 0.0, "dampening": 0.5}, {"momentum": 0.9, "dampening": 0.5}),
])  # fmt: skip
def test_a_schedule_may_turn_on_what_a_first_step_would_have_made(name: str, first: dict, then: dict) -> None:
    """As in torch, had its state begun with zeros; where torch itself goes on, as torch."""
    layout = Layout([TensorSpec("w", Kind.PARAMETER, "float64", (41,))])
    flat = new_payload(layout.total_bytes)
    spec = OptimizerSpec(name, (GroupSpec(("w",), {"lr": 0.1, **first}),))
    optimizer, windows = FlatOptimizer(spec, layout, flat, windows_of(layout), FlatRun.view), windows_of(layout)
    weights = torch.nn.Parameter(torch.zeros(41, dtype=torch.float64))
    reference = getattr(torch.optim, name)([weights], lr=0.1, **first)
    for step in range(8):
        numbers = {"lr": 0.1 / (step + 1), **(first if step < 4 else then)}
        gradient = torch.randn(41, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.set_hyperparameters([numbers])
        for index in range(len(windows)):
            optimizer.step(index, gradient.view(torch.uint8))
        reference.param_groups[0].update(numbers)
        if step == 4 and name != "SGD":
            state = reference.state[weights]
            for key in ("momentum_buffer", "grad_avg") if name == "RMSprop" else ("max_exp_avg_sq",):
                state.setdefault(key, torch.zeros_like(weights))
        weights.grad = gradient
        reference.step()
    torch.testing.assert_close(flat.view(torch.float64), weights.detach())
