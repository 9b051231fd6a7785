"""Several stores, each with its share of a model, end in the bits of one store of all of it, however a model is cut."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from paramserver.common.errors import ParamServerError
from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import (
    GroupSpec,
    OptimizerSpec,
    build_optimizer,
    current_hyperparameters,
    is_elementwise,
    known_optimizers,
)
from paramserver.common.tensors.sharding import Part, divide
from paramserver.ps.tensors import flat_optimizer
from paramserver.ps.tensors.store import Step, Store, StoreOptions

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {"lr": 0.01}) for name, cls in sorted(known_optimizers().items()) if is_elementwise(cls)
} | {
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "amsgrad": ("adam", {"lr": 0.1, "weight_decay": 0.01, "amsgrad": True}),
}  # fmt: skip
Values = dict[str, torch.Tensor]


@pytest.fixture
def several_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


class Case:
    """A model of a few tensors with awkward shapes, in one or two groups, what workers send, and 2 to 4 shards."""

    def __init__(self, seed: int, name: str, arguments: dict[str, Any], dtypes: tuple[str, ...]) -> None:
        self._random, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        draw = self._random.randint
        specs = []
        for index in range(draw(1, 5)):
            shape = (draw(2, 60),) if draw(0, 2) == 0 else (draw(2, 40), draw(1, 40))
            specs.append(TensorSpec(f"p{index}", Kind.PARAMETER, self._random.choice(dtypes), shape))
        specs += [TensorSpec(f"b{index}", Kind.BUFFER, "float32", (draw(2, 50),)) for index in range(draw(0, 2))]
        self.layout = Layout(specs)
        names = [spec.name for spec in specs if spec.kind is Kind.PARAMETER]
        hyperparameters = current_hyperparameters(
            build_optimizer(name, [{"params": [torch.zeros(1, requires_grad=True)], **arguments}]).param_groups[0]
        )
        at = draw(0, len(names))
        groups = [names[::2], names[1::2]] if draw(0, 1) else [names[:at], names[at:]]
        self.optimizer = OptimizerSpec(
            name, tuple(GroupSpec(tuple(group), hyperparameters) for group in groups if group)
        )
        self.weights = self.values()
        self.rounds = [[(self.values(), float(draw(1, 32))) for _ in range(draw(1, 3))] for _ in range(4)]
        self.without = [frozenset(name for name in names if draw(0, 9) == 0) for _ in self.rounds]
        self.num_shards = draw(2, 4)

    def values(self) -> Values:
        return {
            spec.name: torch.randn(spec.shape, generator=self._generator, dtype=torch.float64).to(DTYPES[spec.dtype])
            for spec in self.layout.specs
        }

    def stores(self, num_shards: int, **options: Any) -> list[tuple[Store, dict[str, Part]]]:
        """Each with its parts, by their names."""
        found = []
        for share in divide(self.layout, num_shards):
            parts = {part.name: part for part in share.parts}
            weights = payload_of(share.layout, self.weights, parts)
            found.append(
                (Store(share.layout, weights, share.optimizer(self.optimizer), StoreOptions(**options)), parts)
            )
        return found

    def trained(self, num_shards: int, **options: Any) -> Values:
        """The weights after all rounds; parts put together."""
        stores = self.stores(num_shards, **options)
        for contributions, without in zip(self.rounds, self.without, strict=True):
            for store, parts in stores:
                here = frozenset(name for name, part in parts.items() if part.spec.name in without)
                for rank, (values, weight) in enumerate(contributions):
                    payload = payload_of(store.layout, values, parts)[: store.layout.exchange_bytes].clone()
                    store.fold(payload, weight, rank, without=here)
            norm = math.hypot(*(store.measure() for store, _ in stores)) if "clip_norm" in options else None
            for store, _ in stores:
                store.commit(Step(len(contributions), 0), norm=norm)
        found: Values = {spec.name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in self.layout.specs}
        for store, parts in stores:
            for name, tensor in store.tensors().items():
                parts[name].of(found[parts[name].spec.name]).copy_(tensor)
        return found


def payload_of(layout: Layout, values: Values, parts: dict[str, Part]) -> torch.Tensor:
    payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for spec, view in layout.views(payload):
        view.copy_(parts[spec.name].of(values[parts[spec.name].spec.name]))
    return payload


def cases(name: str, count: int, dtypes: tuple[str, ...] = ("float32",)) -> list[tuple[int, Case]]:
    """Of so many seeds those whose model can be divided."""
    found = []
    for seed in range(count):
        case = Case(seed, *OPTIMIZERS[name], dtypes)
        with suppress(ParamServerError):  # it has too few rows for so many shards
            divide(case.layout, case.num_shards)
            found.append((seed, case))
    assert len(found) > count / 2
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_end_in_the_bits_of_one_store(name: str) -> None:
    for seed, case in cases(name, 12):
        alone, divided = case.trained(1), case.trained(case.num_shards)
        for tensor in alone:
            assert torch.equal(alone[tensor], divided[tensor]), f"seed {seed}, {case.num_shards} shards: {tensor}"


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_so_they_do_with_floats_of_several_kinds_an_average_and_many_windows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_optimizer, "WINDOW_BYTES", 256)
    for seed, case in cases(name, 12, ("float32", "float64", "bfloat16")):
        alone, divided = case.trained(1, polyak=0.9), case.trained(case.num_shards, polyak=0.9)
        for tensor in alone:
            assert torch.equal(alone[tensor], divided[tensor]), f"seed {seed}, {case.num_shards} shards: {tensor}"


@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop"])
def test_so_they_do_where_torch_cuts_a_tensor_among_threads(name: str, several_threads: None) -> None:
    [(_, case)] = cases(name, 1)
    case.layout = Layout([TensorSpec("large", Kind.PARAMETER, "float32", (331, 307)), *case.layout.specs])
    case.weights, case.rounds = case.values(), [[(case.values(), 1.0)] for _ in case.rounds]
    first, *others = case.optimizer.groups
    case.optimizer = OptimizerSpec(
        case.optimizer.name, (GroupSpec(("large", *first.tensors), first.hyperparameters), *others)
    )
    alone, divided = case.trained(1), case.trained(3)
    for tensor in alone:
        assert torch.equal(alone[tensor], divided[tensor]), tensor


def test_what_is_clipped_differs_by_the_rounding_of_the_norm() -> None:
    """A norm is a sum of all elements, which several shards add up in another order."""
    for seed, case in cases("momentum", 12):
        alone, divided = case.trained(1, clip_norm=0.5), case.trained(case.num_shards, clip_norm=0.5)
        for name, tensor in alone.items():
            torch.testing.assert_close(divided[name], tensor, rtol=1e-6, atol=1e-6, msg=f"seed {seed}: {name}")
