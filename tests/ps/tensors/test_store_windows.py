"""A commit made window by window gives what one made at once gives, wherever it is written to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec, is_elementwise, known_optimizers
from paramserver.ps.tensors.flat_optimizer import windows_of
from paramserver.ps.tensors.store import Step, Store, StoreOptions

from .payloads import MIXED as LAYOUT
from .payloads import random_payload
from .test_store import is_finite

ELEMENTWISE = sorted(name for name, cls in known_optimizers().items() if is_elementwise(cls))

GROUPS = (("a", "d"), ("b/c", "c", "f"))  # "e" in none; windows end in the middle of them
ONE_WINDOW = 1 << 30
payload_of = partial(random_payload, LAYOUT)


def optimizer(name: str | None, **hyperparameters: Any) -> OptimizerSpec | None:
    if name is None:
        return None
    return OptimizerSpec(
        name, tuple(GroupSpec(names, {"lr": 0.1 / (i + 1), **hyperparameters}) for i, names in enumerate(GROUPS))
    )


class Twin:
    """A store with windows of its own size, committing where it is told to."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, window_bytes: int, spec: OptimizerSpec | None, **options: Any
    ) -> None:
        monkeypatch.setattr("paramserver.ps.tensors.flat_optimizer.WINDOW_BYTES", window_bytes)
        self.store = Store(LAYOUT, payload_of(999, is_contribution=False), spec, StoreOptions(**options))

    def round(self, number: int, count: int, *, may_keep: bool = False, elsewhere: bool = False) -> list[int]:
        """`count` contributions and a commit; returns the progress told."""
        for rank in range(count):
            for payload in self.store.fold(payload_of(10 * number + rank), 1.0 + rank, 5 - rank, may_keep):
                payload.fill_(0xFF)  # whoever gets it uploads into it at once
        progress: list[int] = []
        hyperparameters = [{"lr": 0.1 / number}, {"lr": 0.2 / number}]
        target = None
        if elsewhere:
            target = torch.full((LAYOUT.total_bytes,), 0xAA, dtype=torch.uint8)
            target[LAYOUT.exchange_bytes :] = self.store.weights[LAYOUT.exchange_bytes :]
        for payload in self.store.commit(Step(3, 3, hyperparameters), target, progress.append):
            payload.fill_(0xFF)
        assert target is None or self.store.weights is target
        return progress

    def values(self) -> dict[str, torch.Tensor]:
        averaged = {f"averaged {name}": tensor for name, tensor in self.store.tensors(averaged=True).items()}
        return self.store.tensors() | averaged


def assert_equal(twin: Twin, other: Twin, tolerance: float = 0.0) -> None:
    theirs = other.values()
    for name, tensor in twin.values().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


SPECS = [
    pytest.param(None, {}, id="weights"),
    pytest.param("SGD", {}, id="SGD"),
    pytest.param("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, id="SGD-momentum"),
    pytest.param("Adam", {"amsgrad": True, "weight_decay": 0.1}, id="Adam-amsgrad"),
    pytest.param("RMSprop", {"momentum": 0.5, "centered": True}, id="RMSprop-centered"),
    *(pytest.param(known_optimizers()[name].__name__, {}, id=f"{name}-") for name in ELEMENTWISE if name != "sgd"),
]


@pytest.mark.parametrize(("name", "hyperparameters"), SPECS)
@pytest.mark.parametrize("window_bytes", [64, 512])
def test_windows_change_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str | None, hyperparameters: dict[str, Any], window_bytes: int
) -> None:
    """To the last bit, but where torch's fused kernels round the end of a tensor differently from its middle."""
    spec = optimizer(name, **hyperparameters)
    whole = Twin(monkeypatch, ONE_WINDOW, spec, polyak=0.9)
    windowed = Twin(monkeypatch, window_bytes, spec, polyak=0.9)
    assert len(windowed.store.windows) > 10
    assert len(whole.store.windows) == 1
    for number in range(1, 4):
        for twin in (whole, windowed):
            twin.round(number, count=number)
        is_fused = whole.store.optimizer is not None and whole.store.optimizer.torch.param_groups[0].get("fused")
        assert_equal(whole, windowed, tolerance=2e-6 if is_fused else 0.0)
    assert not torch.equal(whole.store.tensors()["d"], Twin(monkeypatch, 64, spec).store.tensors()["d"])


@pytest.mark.parametrize(("name", "hyperparameters"), SPECS)
def test_new_memory_now_and_then_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str | None, hyperparameters: dict[str, Any]
) -> None:
    spec = optimizer(name, **hyperparameters)
    in_place = Twin(monkeypatch, 1024, spec, polyak=0.5)
    moving = Twin(monkeypatch, 1024, spec, polyak=0.5)
    for number, elsewhere in enumerate([False, True, True, False, True], start=1):
        old = moving.store.weights
        before = old.clone()
        in_place.round(number, count=2)
        moving.round(number, count=2, elsewhere=elsewhere)
        assert_equal(in_place, moving)
        assert elsewhere == torch.equal(old, before), "what others read is untouched"
        if elsewhere:
            old.fill_(0xFF)  # another version is made there; nothing of the store may point to it
        assert_equal(in_place, moving)


@pytest.mark.parametrize("buffers", ["average", "lowest_rank", "keep"])
@pytest.mark.parametrize("name", [None, "Adam"])
@pytest.mark.parametrize("window_bytes", [64, ONE_WINDOW])
def test_payloads_folded_late_are_folded_the_same(
    monkeypatch: pytest.MonkeyPatch, buffers: Any, name: str | None, window_bytes: int
) -> None:
    spec = optimizer(name)
    eager = Twin(monkeypatch, window_bytes, spec, buffers=buffers, polyak=0.9)
    late = Twin(monkeypatch, window_bytes, spec, buffers=buffers, polyak=0.9)
    for number, count in enumerate([1, 2, 3, 4, 2], start=1):
        eager.round(number, count)
        late.round(number, count, may_keep=True, elsewhere=number % 2 == 0)
        assert_equal(eager, late)


def test_payloads_come_back_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Twin(monkeypatch, 1024, optimizer("SGD")).store
    for keeps in ([False] * 4, [True] * 4, [True, False, True, False], [False, True, False, True]):
        payloads = [payload_of(rank) for rank in range(4)]
        returned = []
        for rank, (payload, may_keep) in enumerate(zip(payloads, keeps, strict=True)):
            returned += store.fold(payload, 1.0, rank, may_keep)
            assert all(item is not payload for item in returned) or not may_keep
        returned += store.commit(Step(4, 0))
        assert sorted(map(id, returned)) == sorted(map(id, payloads))


@pytest.mark.parametrize("window_bytes", [64, 192, 1024, ONE_WINDOW])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_progress_grows_and_ends_at_the_end(
    monkeypatch: pytest.MonkeyPatch, window_bytes: int, elsewhere: bool
) -> None:
    progress = Twin(monkeypatch, window_bytes, optimizer("Adam")).round(1, count=2, elsewhere=elsewhere)
    assert progress == sorted(set(progress))
    assert progress[-1] == LAYOUT.exchange_bytes
    assert len(progress) == -(-LAYOUT.exchange_bytes // window_bytes)


def test_what_progress_says_is_made_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take it at once, while the rest of the commit is still to come."""
    twin = Twin(monkeypatch, 192, optimizer("AdamW"), polyak=0.9)
    target = torch.full((LAYOUT.total_bytes,), 0xAA, dtype=torch.uint8)
    taken = torch.empty(0, dtype=torch.uint8)

    def progress(num_bytes: int) -> None:
        nonlocal taken
        taken = torch.cat([taken, target[len(taken) : num_bytes]])

    twin.store.fold(payload_of(1), 1.0, 0)
    twin.store.fold(payload_of(2), 1.0, 1, may_keep=True)
    twin.store.commit(Step(2, 0), target, progress)
    assert torch.equal(taken, target[: LAYOUT.exchange_bytes])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["a", "c", "d", "e", "f", "mean", "var"])
def test_a_bad_value_is_found_in_its_window_alone(monkeypatch: pytest.MonkeyPatch, name: str, bad: float) -> None:
    store = Twin(monkeypatch, 192, None).store
    views: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda payload: {  # noqa: E731
        spec.name: view for spec, view in LAYOUT.views(payload)
    }
    full = payload_of(5, is_contribution=False)
    flat = views(full)[name].reshape(-1)
    entry = next(entry for entry in LAYOUT.entries if entry.spec.name == name)
    for at in {0, flat.numel() // 2, flat.numel() - 1}:
        kept, flat[at] = flat[at].clone(), bad
        found = [i for i in range(len(store.windows)) if not is_finite(store, full, slice(i, i + 1))]
        assert found == [(entry.offset + at * flat.element_size()) // 192]
        assert not is_finite(store, full)
        flat[at] = kept
    assert is_finite(store, full)


def test_windows_cover_every_payload_once() -> None:
    windows = windows_of(LAYOUT)
    assert [window.start for window in windows] == [0]
    assert windows[-1].end == LAYOUT.exchange_bytes
    assert [
        (window.start, window.end) for window in windows_of(Layout([TensorSpec("w", Kind.PARAMETER, "float32", (0,))]))
    ] == [(0, 0)]
