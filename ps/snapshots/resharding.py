"""Builds a shard's share from the snapshots of a run with another number of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.tensors.optimizers import TableSpec
from ...common.tensors.sharding import Share, divide
from ..tensors.model import outer_spec
from .manifest import AVERAGED, MASTER, OPTIMIZER, TABLES, WEIGHTS, FileName, Loaded, Tensors


def merge(parts: list[Loaded], shard: int, num_shards: int) -> Loaded:
    """Return the share of one of `num_shards` shards, from the snapshots of all old shards."""
    _, manifest, _, whole, optimizer, _, states = parts[0]
    before = divide(whole, len(parts))
    share = divide(whole, num_shards)[shard]
    files: dict[FileName, Tensors] = {}
    for file in (WEIGHTS, AVERAGED):
        if all(file in part.files for part in parts):
            found = put_together([part.files[file] for part in parts], before, share)
            aliases = {alias: found[part.name].clone() for part in share.parts for alias in part.as_spec().aliases}
            files[file] = found | aliases
    if any(MASTER in part.files for part in parts):  # a part without 16-bit weights has none
        files[MASTER] = put_together([part.files.get(MASTER, {}) for part in parts], before, share)
    if any(part.state for part in parts):
        files[OPTIMIZER] = _state_together(parts, before, share)
    mine = share.optimizer(optimizer) if optimizer is not None else None
    if mine is not None and mine.tables:
        files[TABLES] = merge_tables([part.files[TABLES] for part in parts], mine.tables)
    if (outer := manifest.outer) is not None:
        outer = outer_spec(outer.name, outer.groups[0].hyperparameters, share.layout)
    # A shard whose tensors have no state names no keys with one value per parameter.
    scalars = tuple(sorted({key for part in parts for key in part.manifest.scalars}))
    changed = {"tensors": share.layout.specs, "optimizer": mine, "outer": outer, "scalars": scalars}
    manifest = manifest.model_copy(update=changed)
    return Loaded(parts[0].path, manifest, share.layout, whole, optimizer, files, states)


def put_together(files: Sequence[Tensors], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """Return the tensors of `share`, joined from the `files` of the shards `before`. Missing tensors are left out.

    A number of a tensor (its step count) is the same in all its parts.
    """
    by_name = {name: tensor for file in files for name, tensor in file.items()}
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}  # for each tensor: first row, and rows
    for part in (part for share in before for part in share.parts):
        if part.name in by_name:
            pieces.setdefault(part.spec.name, []).append((part.first, by_name[part.name]))
    found: dict[str, torch.Tensor] = {}
    for part in share.parts:
        if part.name in by_name:
            found[part.name] = by_name[part.name]
        elif (known := pieces.get(part.spec.name)) is not None:
            rows = [rows[max(0, part.first - at) : max(0, part.end - at)] for at, rows in known if rows.dim()]
            found[part.name] = torch.cat(rows) if rows else known[0][1].clone()
    return found


def merge_tables(files: Sequence[Tensors], tables: Sequence[TableSpec]) -> dict[str, torch.Tensor]:
    """Return the rows of `tables` with their state, from the files of the old shards."""
    found: dict[str, torch.Tensor] = {}
    for table in tables:
        before = [table.part(number, len(files)) for number in range(len(files))]
        known = {key: tensor for file in files for key, tensor in file.items() if key.partition("/")[2] == table.name}
        for key, example in known.items():  # a shard whose rows were never stepped has no state of them
            if not example.dim():
                found[key] = torch.stack([file[key] for file in files if key in file]).max()
                continue
            empty = [example.new_zeros(part.end - part.first, *example.shape[1:]) for part in before]
            tensors = [file.get(key, other) for file, other in zip(files, empty, strict=True)]
            found[key] = torch.cat([
                tensor[max(0, table.first - part.first) : max(0, table.end - part.first)]
                for tensor, part in zip(tensors, before, strict=True)
            ])  # fmt: skip
    return found


def _state_together(parts: list[Loaded], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """Return the optimizer state. Each of its keys is joined as weights are."""
    state = [(full.partition("/"), tensor) for part in parts for full, tensor in part.state.items()]
    found: dict[str, torch.Tensor] = {}
    for key in {key for (key, _, _), _ in state}:
        tensors = {name: tensor for (its_key, _, name), tensor in state if its_key == key}
        found |= {f"{key}/{name}": tensor for name, tensor in put_together([tensors], before, share).items()}
    return found
