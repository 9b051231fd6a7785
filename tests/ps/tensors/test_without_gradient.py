"""Parameters that got no gradient: the server's optimizer leaves them alone exactly when torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, is_elementwise, known_optimizers
from paramserver.ps.snapshots.manifest import load
from paramserver.ps.snapshots.store_state import restore
from paramserver.ps.tensors.store import Step, Store
from paramserver.tests.ps.snapshots.making import written

ELEMENTWISE = sorted(name for name, cls in known_optimizers().items() if is_elementwise(cls))
ELEMENTWISE += ["adamw+sgd", "sgd+adagrad"]  # of each group another
NAMES = ("a", "b", "c", "d")
GROUPS = ({"lr": 0.05}, {"lr": 0.02})
# Who has a gradient, step by step; b has its first late, d never.
STEPS = ("ac", "abc", "a", "c", "bc", "", "abc", "ab")
MORE = {"sgd": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}, "adamw": {"weight_decay": 0.1}}


def layout(rows: int) -> Layout:
    return Layout(TensorSpec(name, Kind.PARAMETER, "float32", (rows, 3)) for name in NAMES)


def optimizer(name: str) -> OptimizerSpec:
    first, second = name.split("+") if "+" in name else (name, name)
    groups = (
        GroupSpec(("a", "b"), GROUPS[0] | MORE.get(first, {})),
        GroupSpec(("c", "d"), GROUPS[1] | MORE.get(second, {})),
    )
    return OptimizerSpec(name, groups)


def values(seed: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 3, generator=generator) for name in NAMES}


def payload_of(layout: Layout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        view.copy_(tensors[spec.name])
    return payload


def plain(name: str, rows: int) -> dict[str, torch.Tensor]:
    weights = {key: torch.nn.Parameter(value) for key, value in values(0, rows).items()}
    spec = optimizer(name)
    groups = [
        {"params": [weights[tensor] for tensor in group.tensors], **group.hyperparameters} for group in spec.groups
    ]
    optimizers = [known_optimizers()[class_]([group]) for class_, group in zip(spec.classes, groups, strict=True)]
    for number, present in enumerate(STEPS, 1):
        gradients = values(number, rows)
        for key, weight in weights.items():
            weight.grad = gradients[key] if key in present else None
        for item in optimizers:
            item.step()
    return {key: weight.detach() for key, weight in weights.items()}


def contribute(store: Store, number: int, present: str, rows: int) -> None:
    gradients = {key: value * (key in present) for key, value in values(number, rows).items()}
    store.fold(payload_of(store.layout, gradients), 1.0, 0, without=frozenset(NAMES) - set(present))
    store.commit(Step(1, 0))


def new_store(name: str, rows: int) -> Store:
    of = layout(rows)
    return Store(of, payload_of(of, values(0, rows)), optimizer(name))


def assert_equal(store: Store, expected: dict[str, torch.Tensor]) -> None:
    for key, value in store.tensors().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_tensors_without_a_gradient_stay_as_torch_leaves_them(name):
    store = new_store(name, 5)
    for number, present in enumerate(STEPS, 1):
        contribute(store, number, present, 5)
    assert_equal(store, plain(name, 5))


def test_of_several_windows():
    rows = 500_000  # 6 MB a tensor: windows of 4 MiB cut them
    store = new_store("adamw", rows)
    for number, present in enumerate(STEPS, 1):
        contribute(store, number, present, rows)
    assert_equal(store, plain("adamw", rows))


@pytest.mark.parametrize("name", ["adamw", "sgd+adagrad"])
def test_it_outlives_a_snapshot(name, tmp_path: Path):
    store = new_store(name, 5)
    for number, present in enumerate(STEPS, 1):
        if number in (2, 5):
            path = written(tmp_path, store, store.layout, optimizer(name))
            store = new_store(name, 5)
            restore(store, load(path))
        contribute(store, number, present, 5)
    assert_equal(store, plain(name, 5))


def test_one_gradient_in_a_round_is_enough():
    store, other = new_store("adamw", 5), new_store("adamw", 5)
    gradients = values(1, 5)
    store.fold(payload_of(store.layout, gradients), 1.0, 0)
    store.fold(
        payload_of(store.layout, {key: value * 0 for key, value in gradients.items()}), 1.0, 1, without=frozenset("b")
    )
    store.commit(Step(2, 0))
    other.fold(payload_of(store.layout, {key: value / 2 for key, value in gradients.items()}), 1.0, 0)
    other.commit(Step(1, 0))
    assert_equal(store, other.tensors())
