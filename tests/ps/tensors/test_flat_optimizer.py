"""The optimizer over flat weights, by itself: its parameters, and state that a schedule turns on. Its bits, in any
company, are those of `test_store_shards.py`; new memory those of `test_store_windows.py`."""

from __future__ import annotations

import pytest
import torch

from paramserver.common.tensors.layout import FlatRun, Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.ps.tensors.flat_optimizer import FlatOptimizer, windows_of

# No number of elements is a multiple of 16; weights and biases are in groups of their own.
SHAPES = {"w0": (7, 9), "b0": (7,), "w1": (5, 7), "b1": (5,), "w2": (3, 37)}
GROUPS = (("w0", "w1", "w2"), ("b0", "b1"))
LAYOUT = Layout([TensorSpec(name, Kind.PARAMETER, "float32", shape) for name, shape in SHAPES.items()])


def test_the_ends_of_all_runs_of_a_group_are_one_parameter() -> None:
    spec = OptimizerSpec("Adam", tuple(GroupSpec(names, {"lr": 0.1}) for names in GROUPS))
    weights = new_payload(LAYOUT.total_bytes)
    groups = FlatOptimizer(spec, LAYOUT, weights, windows_of(LAYOUT), FlatRun.view).torch.param_groups
    sizes = [[param.numel() for param in group["params"]] for group in groups]
    assert sizes == [[48, 32, 96, 48], [16]], "whole lines of 16 elements each, then what is left of all"


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
