"""Tables of rows in snapshots: what was written is gone on with, also by another number of shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramserver.common.errors import CheckpointError
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import divide
from paramserver.common.tensors.tables import make_spec
from paramserver.ps.snapshots.checkpoint import load, write
from paramserver.ps.snapshots.manifest import ShareEntry
from paramserver.ps.snapshots.resharding import merge
from paramserver.ps.snapshots.store_state import capture, manifest_of, restore, tensors_of
from paramserver.ps.tensors.store import Step, Store
from paramserver.ps.tensors.tables import Rows, Tables

WHOLE = Layout([TensorSpec("w", Kind.PARAMETER, "float32", (12, 2))])
TABLES = tuple(
    make_spec(name, 11, 2, "float32", 0.5, name, {"lr": 0.1})
    for name in ("sgd", "adagrad", "sparse_adam", "rowwise_adagrad")
)
SGD = OptimizerSpec("SGD", (GroupSpec(("w",), {"lr": 0.1}),), TABLES)
FACTS = {
    "run": "run", "server_incarnation": 1, "mode": "async", "policy": {}, "rows": {},
    "num_joins": {}, "training": {}, "seed": 1, "paramserver_version": "0",
}  # fmt: skip


def store_of(shard: int, shards: int, seed: int | None) -> Store:
    share = divide(WHOLE, shards)[shard]
    optimizer = share.optimizer(SGD)
    weights = torch.zeros(share.layout.total_bytes, dtype=torch.uint8)
    return Store(share.layout, weights, optimizer, tables=Tables(optimizer.tables, seed))


def step(store: Store) -> None:
    rows = []
    for number, spec in enumerate(store.tables.specs):
        ids = torch.arange(spec.first, spec.end, 2)
        rows.append(Rows(number, ids, ids.float()[:, None].repeat(1, 2) + 1))
    store.fold(torch.zeros(store.layout.exchange_bytes, dtype=torch.uint8), 1.0, 0, rows=rows)
    store.commit(Step(1, 0))


def written(folder: Path, shard: int, shards: int, store: Store) -> Path:
    share = divide(WHOLE, shards)[shard]
    optimizer, captured = share.optimizer(SGD), capture(store)
    entry = ShareEntry(shard=shard, shards=shards, tensors=WHOLE.specs, optimizer=SGD) if shards > 1 else None
    manifest = manifest_of(captured, share.layout, optimizer, share=entry, **FACTS)
    return write(folder / f"{shard}-of-{shards}", manifest, tensors_of(captured, share.layout, optimizer)).path


def together(stores: list[Store]) -> dict[str, torch.Tensor]:
    states = [store.tables.state() for store in stores]
    return {
        key: torch.cat([state[key] for state in states]) if value.dim() else value for key, value in states[0].items()
    }


def test_a_table_and_its_state_come_back(tmp_path: Path):
    store, other = store_of(0, 1, 1), store_of(0, 1, None)
    step(store)
    captured = capture(store)
    step(store)
    assert capture(store, captured) is not captured  # in the memory of the one before
    restore(other, load(written(tmp_path, 0, 1, store)))
    for item in (store, other):
        step(item)
    mine, theirs = store.tables.state(), other.tables.state()
    assert mine.keys() == theirs.keys() and len(mine) == 4 + 2 + 3 + 1
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("now", [2, 4])
def test_another_number_of_shards_has_the_same_rows(tmp_path: Path, now: int):
    before = [store_of(shard, 3, 1) for shard in range(3)]
    for store in before:
        step(store)
    parts = [load(written(tmp_path, shard, 3, store)) for shard, store in enumerate(before)]
    after = [store_of(shard, now, None) for shard in range(now)]
    for shard, store in enumerate(after):
        restore(store, merge(parts, shard, now))
    wanted, found = together(before), together(after)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_snapshot_without_the_table_is_refused(tmp_path: Path):
    loaded = load(written(tmp_path, 0, 1, store_of(0, 1, 1)))
    files = {name: tensors for name, tensors in loaded.files.items() if name != "tables.safetensors"}
    with pytest.raises(CheckpointError, match="table 'sgd' is missing"):
        restore(store_of(0, 1, None), loaded._replace(files=files))
