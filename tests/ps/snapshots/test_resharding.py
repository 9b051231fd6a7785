"""Optimizer state for another number of shards, where some of the old shards have none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramserver.common.tensors.layout import Kind, Layout, TensorSpec, new_payload
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import Share, divide
from paramserver.common.tensors.tables import make_spec
from paramserver.ps.snapshots import checkpoint
from paramserver.ps.snapshots.manifest import ShareEntry
from paramserver.ps.snapshots.resharding import merge, merge_tables
from paramserver.ps.snapshots.store_state import capture, manifest_of, restore, tensors_of
from paramserver.ps.tensors.store import Step, Store, StoreOptions
from paramserver.ps.tensors.tables import Rows, Tables

WHOLE = Layout([TensorSpec(name, Kind.PARAMETER, "float32", (8, 4)) for name in ("backbone", "head")])
ADAM = OptimizerSpec("Adam", (GroupSpec(("head",), {"lr": 0.1}),))


def store_of(share: Share) -> Store:
    return Store(share.layout, new_payload(share.layout.total_bytes), share.optimizer(ADAM), StoreOptions())


def step(store: Store) -> None:
    store.fold(torch.ones(store.layout.exchange_bytes // 4).view(torch.uint8).clone(), 1.0, 0)
    store.commit(Step(1, 0))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_first_shard_has_only_tensors_without_state(tmp_path: Path, num_shards: int) -> None:
    parts = []
    for share in divide(WHOLE, 2):
        store, optimizer = store_of(share), share.optimizer(ADAM)
        step(store)
        captured = capture(store)
        manifest = manifest_of(
            captured, share.layout, optimizer, run="r", server_incarnation=1, mode="sync", policy={}, rows={},
            num_joins={}, training={}, seed=0, paramserver_version="x",
            share=ShareEntry(shard=share.number, shards=2, tensors=WHOLE.specs, optimizer=ADAM),
        )  # fmt: skip
        folder = tmp_path / str(share.number)
        folder.mkdir()
        written = checkpoint.write(folder, manifest, tensors_of(captured, share.layout, optimizer))
        parts.append(checkpoint.load(written.path))
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
