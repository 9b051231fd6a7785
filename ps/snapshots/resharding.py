"""Snapshots of a run of some number of shards, for another number: each share put together from all the old ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...common.tensors.sharding import Part, Share, divide
from .checkpoint import Loaded
from .manifest import AVERAGED, OPTIMIZER, WEIGHTS, FileName, Tensors


def merge(parts: list[Loaded], shard: int, num_shards: int) -> Loaded:
    """The share of one of `num_shards` shards, from the snapshots of all shards there were."""
    _, manifest, _, whole, optimizer, _ = parts[0]
    before = divide(whole, len(parts))
    share = divide(whole, num_shards)[shard]
    files: dict[FileName, Tensors] = {}
    for file in (WEIGHTS, AVERAGED):
        if all(file in one.files for one in parts):
            found = put_together([one.files[file] for one in parts], before, share)
            aliases = {alias: found[part.name].clone() for part in share.parts for alias in part.as_spec().aliases}
            files[file] = found | aliases
    if any(one.state for one in parts):
        files[OPTIMIZER] = _collect_state([one.state for one in parts], before, share, set(manifest.scalars))
    mine = share.optimizer(optimizer) if optimizer is not None else None
    manifest = manifest.model_copy(update={"tensors": share.layout.specs, "optimizer": mine})
    return Loaded(parts[0].path, manifest, share.layout, whole, optimizer, files)


def put_together(files: Sequence[Tensors], before: list[Share], share: Share) -> dict[str, torch.Tensor]:
    """The tensors of `share` that there are, cut and joined from those of the shards there were."""
    held: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for part, tensor in _parts_in(files, before):
        held.setdefault(part.spec.name, []).append((part.first, part.end, tensor))
    found: dict[str, torch.Tensor] = {}
    for part in share.parts:
        _, first, end = part
        pieces = held.get(part.spec.name, [])
        if len(pieces) == 1 and pieces[0][:2] == (first, end):
            found[part.name] = pieces[0][2]
        elif pieces:
            rows = [t[max(first, a) - a : min(end, b) - a] for a, b, t in pieces if a < end and b > first]
            found[part.name] = torch.cat(rows) if rows else pieces[0][2][:0]
    return found


def _collect_state(
    states: list[Tensors], before: list[Share], share: Share, scalars: set[str]
) -> dict[str, torch.Tensor]:
    """Optimizer state, key by key: elementwise as the weights are, or one value for all parts of a parameter."""
    by_key: dict[str, list[dict[str, torch.Tensor]]] = {}
    for shard, state in enumerate(states):
        for full, tensor in state.items():
            key, _, name = full.partition("/")
            by_key.setdefault(key, [{} for _ in states])[shard][name] = tensor
    found: dict[str, torch.Tensor] = {}
    for key, files in by_key.items():
        if key in scalars:
            values = {part.spec.name: value for part, value in _parts_in(files, before)}
            names = {part.name: part.spec.name for part in share.parts}
            here = {name: values[whole].clone() for name, whole in names.items() if whole in values}
        else:
            here = put_together(files, before, share)
        found |= {f"{key}/{name}": tensor for name, tensor in here.items()}
    return found


def _parts_in(files: Sequence[Tensors], shares: list[Share]) -> Iterator[tuple[Part, torch.Tensor]]:
    """Each part of a shard, with the tensor that its file has of it, if any."""
    for file, share in zip(files, shares, strict=True):
        yield from ((part, file[part.name]) for part in share.parts if part.name in file)
