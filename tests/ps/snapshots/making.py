"""Snapshots for the tests of this folder: of a small model, written where they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from paramserver.common.config.schema import Config
from paramserver.common.tensors.layout import Kind, Layout, TensorSpec
from paramserver.common.tensors.optimizers import GroupSpec, OptimizerSpec
from paramserver.common.tensors.sharding import divide
from paramserver.common.wire.records import Row
from paramserver.ps.snapshots import store_state
from paramserver.ps.snapshots.available import Available
from paramserver.ps.snapshots.manifest import OPTIMIZER, WEIGHTS, Loaded, Manifest, ShareEntry, write
from paramserver.ps.tensors.store import Store

LAYOUT = Layout([
    TensorSpec("w", Kind.PARAMETER, "float32", (3, 2), ("tied",)),
    TensorSpec("b", Kind.PARAMETER, "float32", (4,)),
    TensorSpec("count", Kind.BUFFER, "int64", ()),
])  # fmt: skip
ADAM = OptimizerSpec("Adam", (GroupSpec(("w", "b"), {"lr": 0.1, "betas": [0.9, 0.99]}),))
FACTS = {
    "run": "r", "server_incarnation": 1, "mode": "sync", "policy": {}, "rows": {},
    "num_joins": {}, "training": {}, "seed": 0, "paramserver_version": "0",
}  # fmt: skip


def manifest_of(version: int, incarnation: int = 1, **changes: Any) -> Manifest:
    return Manifest(**{
        "run": "run", "server_incarnation": incarnation, "version": version, "mode": "sync",
        "policy": {"started": -float("inf"), "members": [1, 2.5, None]},
        "rows": {0: Row(version, version), 3: Row(1, 1)},
        "num_joins": {0: 2, 3: 1}, "training": {"note": "ünï"}, "tensors": LAYOUT.specs,
        "optimizer": ADAM, "hyperparameters": ({"lr": 0.1 + 0.2},), "scalars": ("step",),
        "seed": 7, "paramserver_version": "0", **changes,
    })  # fmt: skip


def files_of(version: int) -> dict[Any, dict[str, torch.Tensor]]:
    w, b, step = torch.full((3, 2), float(version)), torch.arange(4.0) + version, torch.tensor(float(version))
    return {
        WEIGHTS: {"w": w, "tied": w.clone(), "b": b, "count": torch.tensor(version)},
        OPTIMIZER: {
            "exp_avg/w": -w, "exp_avg_sq/w": w * w, "step/w": step,
            "exp_avg/b": -b, "exp_avg_sq/b": b * b, "step/b": step.clone(),
        },
    }  # fmt: skip


def snapshot(directory: Path, version: int, incarnation: int = 1) -> Path:
    return write(directory, manifest_of(version, incarnation), files_of(version)).path


def empty_store(layout: Layout, optimizer: OptimizerSpec | None, **options: Any) -> Store:
    return Store(layout, torch.zeros(layout.total_bytes, dtype=torch.uint8), optimizer, **options)


def written(
    folder: Path, store: Store, whole: Layout, optimizer: OptimizerSpec | None, shard: int = 0, shards: int = 1,
    outer: OptimizerSpec | None = None, **facts: Any,
) -> Path:  # fmt: skip
    """Write a snapshot of a store that has a shard's part of the model `whole`. `optimizer`: of the whole model."""
    entry, mine, captured = None, optimizer, store_state.capture(store)
    if shards > 1:
        entry = ShareEntry(shard=shard, shards=shards, tensors=whole.specs, optimizer=optimizer)
        mine = divide(whole, shards)[shard].optimizer(optimizer) if optimizer is not None else None
    manifest = store_state.manifest_of(captured, store.layout, mine, share=entry, outer=outer, **FACTS | facts)
    return write(folder, manifest, store_state.tensors_of(captured, store.layout, outer or mine)).path


def hidden(directory: Path) -> list[str]:
    """What lies there beside snapshots."""
    return sorted(
        path.name for path in directory.iterdir() if not re.fullmatch(r"snapshot-\d{12}-\d+|\.lock", path.name)
    )


def load_newest(folder: Path) -> Loaded | None:
    """As a server of one process finds it."""
    available = Available(Config(checkpoint={"dir": str(folder)}))
    name = available.newest()
    return available.load(name) if name is not None else None
