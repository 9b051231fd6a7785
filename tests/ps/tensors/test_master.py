"""16-bit weights in modes with local steps move as float32 weights do, to the precision of 16 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.common.registry import AGGREGATIONS
from paramserver.common.tensors.layout import DTYPES, Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import Share, divide
from paramserver.ps.snapshots.manifest import MASTER, Loaded, load
from paramserver.ps.snapshots.resharding import merge as resharded
from paramserver.ps.snapshots.store_state import restore
from paramserver.ps.tensors.model import outer_spec
from paramserver.ps.tensors.sanity import Unsound
from paramserver.ps.tensors.store import Step, Store, StoreOptions
from paramserver.relay.region import merge
from paramserver.tests.ps.snapshots.making import written

P, B, F = Kind.PARAMETER, Kind.BUFFER, Kind.FROZEN
SPECS = (
    TensorSpec("frozen", F, "bfloat16", (4,)),
    TensorSpec("a", P, "bfloat16", (37, 11), ("tied",)),
    TensorSpec("norm", P, "float32", (33,)),
    TensorSpec("b", P, "bfloat16", (65,)),
    TensorSpec("half", P, "float16", (9, 7)),
    TensorSpec("mean", B, "bfloat16", (5,)),
    TensorSpec("own", B, "bfloat16", (5,), averaged=False),
    TensorSpec("count", B, "int64", ()),
)
THEIRS = OptimizerSpec("AdamW", (GroupSpec(("a", "norm", "b", "half"), {"lr": 0.1}),))
MIXED, ONE = Layout(SPECS), Layout([TensorSpec("w", P, "bfloat16", (3,))])
# What the server steps with: nothing (localsgd), or an outer optimizer (diloco, async_diloco).
OUTER: dict[str, tuple[str, dict[str, Any]] | None] = {
    "localsgd": None,
    "plain": ("SGD", {"lr": 0.7, "momentum": 0.0, "nesterov": False}),
    "diloco": ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "async_diloco": ("DelayedNesterov", {"lr": 1.0, "momentum": 0.5}),
}


def outer_of(name: str, layout: Layout) -> OptimizerSpec | None:
    found = OUTER[name]
    return None if found is None else outer_spec(*found, layout)


def wide(layout: Layout) -> Layout:
    return Layout(replace(spec, dtype="float32") if DTYPES[spec.dtype].itemsize == 2 else spec for spec in layout.specs)


def store_of(name: str, layout: Layout, **options: Any) -> Store:
    weights = new_payload(layout.total_bytes)
    for _, view in layout.views(weights):
        view.fill_(1)
    options = {"has_master": True, "measures_direction": True, **options}
    return Store(layout, weights, outer_of(name, layout), StoreOptions(**options))


def contribution(store: Store, moves: dict[str, float]) -> torch.Tensor:
    """What a worker sends that began at the store's weights and moved some tensors: weights, or minus the moves."""
    payload = new_payload(store.layout.exchange_bytes)
    begun = store.tensors()
    for entry in store.layout.entries:
        if entry.spec.kind is not F:
            move, is_delta = (
                moves.get(entry.spec.name.partition("[")[0], 0.0),
                store.optimizer is not None and entry.spec.kind is P,
            )
            entry.view(payload).copy_(begun[entry.spec.name] * (not is_delta) + (-move if is_delta else move))
    return payload


def round_of(store: Store, seed: int, num: int) -> None:
    """A round of `num` workers, of which each moves some tensors by a bit of bfloat16 below 1."""
    chance = torch.Generator().manual_seed(seed)
    for rank in range(num):
        names = [spec.name for spec in SPECS if DTYPES[spec.dtype].is_floating_point]
        bits = torch.randint(-1, 2, (len(names),), generator=chance) * 2.0**-8
        weight = float(torch.randint(1, 9, (), generator=chance))
        moves = {name: float(bit) - 2.0**-8 for name, bit in zip(names, bits, strict=True)}
        store.fold(contribution(store, moves), weight, rank)
    store.commit(Step(num, 0, lr_scale=0.5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("name", "rate"), [("localsgd", 1.0), ("plain", 0.7)])
def test_half_a_bit_of_each_round_adds_up(name: str, rate: float, dtype: str) -> None:
    layout = Layout([TensorSpec("w", P, dtype, (3,))])
    store, bit = store_of(name, layout), {"bfloat16": 2.0**-8}.get(dtype, 2.0**-11)
    for _ in range(40):
        for rank, moves in enumerate(({"w": -bit}, {})):
            store.fold(contribution(store, moves), 1.0, rank)
        store.commit(Step(2, 0))
    wanted = torch.full((3,), 1 - 40 * rate * bit / 2).to(DTYPES[dtype])
    torch.testing.assert_close(store.tensors()["w"], wanted, rtol=1e-6 if dtype == "float32" else 0, atol=0)


@given(
    name=st.sampled_from(sorted(OUTER)), seed=st.integers(0, 999), num=st.integers(1, 4), rounds=st.integers(1, 12),
    aggregation=st.sampled_from(["mean", "median"]), buffers=st.sampled_from(["average", "lowest_rank", "keep"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_they_move_as_float32_weights_do(
    name: str, seed: int, num: int, rounds: int, aggregation: str, buffers: str
) -> None:
    options: dict[str, Any] = {"aggregation": AGGREGATIONS.load(aggregation), "buffers": buffers, "polyak": 0.5}
    short, exact = store_of(name, MIXED, **options), store_of(name, wide(MIXED), **options)
    assert short.master is not None and exact.master is None
    for step in range(rounds):
        target = short.weights.clone() if step % 2 else None  # a version that is being read
        for store in (short, exact):
            round_of(store, seed + step, num)
        if target is not None:
            short.commit(Step(num, 0), target)
            exact.commit(Step(num, 0))
    for averaged in (False, True):
        wanted = exact.tensors(averaged)
        for tensor_name, tensor in short.tensors(averaged).items():
            if tensor_name != "own" or averaged:
                atol = 2.0 ** {torch.bfloat16: -7, torch.float16: -10}.get(tensor.dtype, -20)
                torch.testing.assert_close(tensor.float(), wanted[tensor_name].float(), rtol=0, atol=atol)


def saved(store: Store, share: Share, name: str, folder: Path) -> Loaded:
    outer = outer_of(name, store.layout)
    return load(written(folder, store, MIXED, THEIRS, share.number, 2, outer, mode="diloco"))


@pytest.mark.parametrize("name", ["localsgd", "diloco", "async_diloco"])
@pytest.mark.parametrize("num_shards", [2, 3])
def test_snapshots_and_other_numbers_of_shards_lose_nothing(tmp_path: Path, name: str, num_shards: int) -> None:
    def all_of(stores: list[Store], averaged: bool) -> dict[str, torch.Tensor]:
        """Values of all tensors in float32: two stores that agree go on alike."""
        found: dict[str, list[torch.Tensor]] = {}
        for store in stores:
            payload = store.averaged if averaged else store.master.weights if store.master else store.weights
            assert payload is not None
            for spec, view in store.step_layout.views(payload):
                found.setdefault(spec.name.partition("[")[0], []).append(view.reshape(-1).float())
        return {key: torch.cat(values) for key, values in found.items()}

    before = divide(MIXED, 2)
    stores = [store_of(name, share.layout, polyak=0.9) for share in before]
    for step in range(5):
        for store in stores:
            round_of(store, step, 2)
    folders = [tmp_path / str(share.number) for share in before]
    parts = [saved(*item) for item in zip(stores, before, [name, name], folders, strict=True)]
    assert any(MASTER in part.files for part in parts)
    again = []
    for share in divide(MIXED, num_shards):
        store = store_of(name, share.layout, polyak=0.9)
        restore(store, resharded(parts, share.number, num_shards), is_outer=name != "localsgd")
        again.append(store)
    for step in range(5, 8):
        for store in (*stores, *again):
            round_of(store, step, 2)
    for averaged in (False, True):
        wanted, found = all_of(stores, averaged), all_of(again, averaged)
        for key, value in wanted.items():
            assert torch.equal(value.sort().values, found[key].sort().values), key


def test_a_run_may_turn_them_off_and_on(tmp_path: Path) -> None:
    share = divide(MIXED, 2)[0]
    store = store_of("diloco", share.layout)
    round_of(store, 0, 2)
    loaded = saved(store, share, "diloco", tmp_path)
    without = store_of("diloco", share.layout, has_master=False)
    restore(without, loaded, is_outer=True)
    assert without.master is None and all(torch.equal(without.tensors()[k], v) for k, v in store.tensors().items())
    round_of(without, 1, 2)
    restore(store, saved(without, share, "diloco", tmp_path / "off"), is_outer=True)
    assert all(torch.equal(without.tensors()[k], v) for k, v in store.tensors().items())


def test_a_region_merges_into_them() -> None:
    store = store_of("localsgd", ONE)
    for _ in range(3):
        sent = store.weights.clone()
        for rank, moves in enumerate(({"w": -(2.0**-8)}, {})):
            store.fold(contribution(store, moves), 1.0, rank)
        store.commit(Step(2, 0))
        above = sent.clone()  # the run above moved nothing
        store.change(merge, sent, above)
    assert store.tensors()["w"].tolist() == [1 - 2.0**-7] * 3  # 1.5 bits, rounded to the even one
    assert store.master is not None and store.master.weights.view(torch.float32).tolist() == [1 - 3 * 2.0**-9] * 3


def test_a_value_that_16_bits_cannot_hold_is_unsound() -> None:
    store = store_of("plain", Layout([TensorSpec("w", P, "float16", (3,))]))
    store.fold(contribution(store, {"w": 60000.0}), 1.0, 0)
    store.commit(Step(1, 0))
    store.fold(contribution(store, {"w": 60000.0}), 1.0, 0)
    with pytest.raises(Unsound, match="inf in 'w'"):
        store.commit(Step(1, 0))


def test_float32_and_gradient_modes_have_none() -> None:
    assert store_of("diloco", wide(MIXED)).master is None
    assert store_of("diloco", MIXED, has_master=False).master is None
    assert store_of("diloco", MIXED).num_bytes["master"] >= 4 * (37 * 11 + 33 + 65 + 63)
