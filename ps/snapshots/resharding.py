"""Snapshots of a run of some number of shards, for another number: each share put together from all the old ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...common.tensors.sharding import Share, divide
from .checkpoint import Loaded
from .manifest import AVERAGED, OPTIMIZER, WEIGHTS, FileName, tensor_entries

Tensors = Mapping[str, torch.Tensor]


def merge(parts: list[Loaded], shard: int, num_shards: int) -> Loaded:
    """The share of one of `num_shards` shards, from the snapshots of all shards there were."""
    whole, optimizer = parts[0].whole
    before = divide(whole, len(parts))
    share = divide(whole, num_shards)[shard]
    files: dict[FileName, dict[str, torch.Tensor]] = {WEIGHTS: _collect([one.weights for one in parts], before, share)}
    averages = [one.averaged for one in parts]
    if all(average is not None for average in averages):
        files[AVERAGED] = _collect([average or {} for average in averages], before, share)
    if any(one.state for one in parts):
        files[OPTIMIZER] = _collect_state(parts, before, share)
    mine = share.optimizer(optimizer) if optimizer is not None else None
    manifest = parts[0].manifest.model_copy(update={"tensors": tensor_entries(share.layout)})
    return Loaded(parts[0].path, manifest, share.layout, mine, files, (whole, optimizer))


def _collect(files: Sequence[Tensors], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """The tensors of `share`, cut and joined from those of the shards there were."""
    held: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for file, one in zip(files, before, strict=True):
        for part in one.parts:
            if part.name in file:
                end = part.end if not part.is_whole else _rows(part.spec.shape)
                held.setdefault(part.spec.name, []).append((part.first, end, file[part.name]))
    found: dict[str, torch.Tensor] = {}
    for part in share.parts:
        pieces = held.get(part.spec.name, [])
        if not pieces:
            continue
        first, end = (0, _rows(part.spec.shape)) if part.is_whole else (part.first, part.end)
        if len(pieces) == 1 and pieces[0][:2] == (first, end):
            joined = pieces[0][2]
        else:
            rows = [t[max(first, a) - a : min(end, b) - a] for a, b, t in pieces if a < end and b > first]
            joined = torch.cat(rows) if rows else pieces[0][2][:0]
        for name in (part.name, *part.as_spec().aliases):
            found[name] = joined if name == part.name else joined.clone()
    return found


def _collect_state(parts: list[Loaded], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """Optimizer state, key by key: elementwise as the weights are, one value per parameter as of its first part."""
    scalars = set(parts[0].manifest.scalars)
    keys = {full.partition("/")[0] for one in parts for full in one.state}
    found: dict[str, torch.Tensor] = {}
    for key in sorted(keys):
        files = [
            {full.partition("/")[2]: tensor for full, tensor in one.state.items() if full.partition("/")[0] == key}
            for one in parts
        ]
        if key in scalars:
            values = {
                part.spec.name: file[part.name]
                for file, one in zip(files, before, strict=True)
                for part in one.parts
                if part.name in file
            }
            for part in share.parts:
                if part.spec.name in values:
                    found[f"{key}/{part.name}"] = values[part.spec.name].clone()
        else:
            found |= {f"{key}/{name}": tensor for name, tensor in _collect(files, before, share).items()}
    aliases = {alias for part in share.parts for alias in part.as_spec().aliases}
    return {full: tensor for full, tensor in found.items() if full.partition("/")[2] not in aliases}


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
