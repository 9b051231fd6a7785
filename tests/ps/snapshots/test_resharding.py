"""Tables of rows and optimizer state in snapshots: also for another number of shards, of which some have none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import Share, divide
from paramserver.common.tensors.tables import make_spec
from paramserver.ps.snapshots.manifest import load
from paramserver.ps.snapshots.resharding import merge, merge_tables
from paramserver.ps.snapshots.store_state import capture, restore
from paramserver.ps.tensors.store import Rows, Step, Store, Tables
from paramserver.tests.ps.snapshots.making import empty_store, written

WHOLE = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (8, 4)) for name in ("backbone", "head")])
ADAM = OptimizerSpec("Adam", (GroupSpec(("head",), {"lr": 0.1}),))


def store_of(share: Share) -> Store:
    return empty_store(share.layout, share.optimizer(ADAM))


def step(store: Store) -> None:
    store.fold(torch.ones(store.layout.exchange_bytes // 4).view(torch.uint8).clone(), 1.0, 0)
    store.commit(Step(1, 0))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_first_shard_has_only_tensors_without_state(tmp_path: Path, num_shards: int) -> None:
    parts = []
    for share in divide(WHOLE, 2):
        store = store_of(share)
        step(store)
        parts.append(load(written(tmp_path / str(share.number), store, WHOLE, ADAM, share.number, 2)))
    assert parts[0].manifest.scalars == ()
    for share in divide(WHOLE, num_shards):
        store = store_of(share)
        restore(store, merge(parts, share.number, num_shards))
        step(store)
        for name, tensor in store.tensors().items():
            assert torch.allclose(tensor, torch.full_like(tensor, -0.2 if "head" in name else 0.0)), name


@pytest.mark.parametrize("touched", [1, 6])
def test_only_one_shard_has_stepped_rows(touched: int) -> None:
    spec = make_spec("emb", 8, 2, "float32", 0.1, "SparseAdam", {"lr": 0.1})

    def stepped(tables: Tables, times: int, value: float) -> Tables:
        part = tables.specs[0]
        for _ in range(times):
            is_here = part.first <= touched < part.end
            tables.fold([Rows(0, torch.tensor([touched]), torch.full((1, 2), value))] if is_here else [], 1.0)
            tables.commit()
        return tables

    parts = [stepped(Tables([spec.part(shard, 2)], 0), 3, 1.0).state() for shard in (0, 1)]
    merged = Tables([spec], 0)
    merged.set_state(merge_tables(parts, [spec]))
    wanted = stepped(stepped(Tables([spec], 0), 3, 1.0), 1, -2.0).state()
    found = stepped(merged, 1, -2.0).state()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- tables of rows -----------------------------------------------------------------------------

SMALL = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (12, 2))])
TABLES = tuple(
    make_spec(name, 11, 2, "float32", 0.5, name, {"lr": 0.1})
    for name in ("sgd", "adagrad", "sparse_adam", "rowwise_adagrad")
)
SGD = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.1}),), TABLES)


def store_with_tables(shard: int, shards: int, seed: int | None) -> Store:
    share = divide(SMALL, shards)[shard]
    optimizer = share.optimizer(SGD)
    return empty_store(share.layout, optimizer, tables=Tables(optimizer.tables, seed))


def step_rows(store: Store) -> None:
    rows = []
    for number, spec in enumerate(store.tables.specs):
        ids = torch.arange(spec.first, spec.end, 2)
        rows.append(Rows(number, ids, ids.float()[:, None].repeat(1, 2) + 1))
    store.fold(torch.zeros(store.layout.exchange_bytes, dtype=torch.uint8), 1.0, 0, rows=rows)
    store.commit(Step(1, 0))


def together(stores: list[Store]) -> dict[str, torch.Tensor]:
    states = [store.tables.state() for store in stores]
    return {
        key: torch.cat([state[key] for state in states]) if value.dim() else value for key, value in states[0].items()
    }


def test_a_table_and_its_state_come_back(tmp_path: Path):
    store, other = store_with_tables(0, 1, 1), store_with_tables(0, 1, None)
    step_rows(store)
    captured = capture(store)
    step_rows(store)
    assert capture(store, captured) is not captured  # in the memory of the one before
    restore(other, load(written(tmp_path, store, SMALL, SGD)))
    for item in (store, other):
        step_rows(item)
    mine, theirs = store.tables.state(), other.tables.state()
    assert mine.keys() == theirs.keys() and len(mine) == 4 + 2 + 3 + 1
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("now", [2, 4])
def test_another_number_of_shards_has_the_same_rows(tmp_path: Path, now: int):
    before = [store_with_tables(shard, 3, 1) for shard in range(3)]
    for store in before:
        step_rows(store)
    parts = [load(written(tmp_path / str(shard), store, SMALL, SGD, shard, 3)) for shard, store in enumerate(before)]
    after = [store_with_tables(shard, now, None) for shard in range(now)]
    for shard, store in enumerate(after):
        restore(store, merge(parts, shard, now))
    wanted, found = together(before), together(after)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_snapshot_without_the_table_is_refused(tmp_path: Path):
    loaded = load(written(tmp_path, store_with_tables(0, 1, 1), SMALL, SGD))
    files = {name: tensors for name, tensors in loaded.files.items() if name != "tables.safetensors"}
    with pytest.raises(CheckpointError, match="table 'sgd' is missing"):
        restore(store_with_tables(0, 1, None), loaded._replace(files=files))
