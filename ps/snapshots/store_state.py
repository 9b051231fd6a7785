"""The state of a store: copied while training waits, given a name tensor by tensor, put back.

`capture` runs on the tensor thread between two commits and is one copy of memory; everything slower
works on what it returns, beside training. State is kept per tensor of the model, so a store that cuts
the model into other windows can take it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...common.errors import CheckpointError
from ...common.tensors.layout import DTYPES, Entry, Layout
from ...common.tensors.optimizers import OptimizerSpec
from ..tensors.flat_optimizer import OptimizerState
from ..tensors.store import Store
from .checkpoint import Loaded
from .manifest import (
    AVERAGED,
    OPTIMIZER,
    WEIGHTS,
    FileName,
    Manifest,
    members_of,
    optimizer_entry,
    state_keys,
    tensor_entries,
)


@dataclass
class Captured:
    """A store between two commits. `weights` and `averaged` are uint8 [layout.total_bytes]."""

    version: int
    weights: torch.Tensor
    averaged: torch.Tensor | None
    optimizer: OptimizerState | None


def capture(store: Store, into: Captured | None = None) -> Captured:
    """A copy of everything that commits change.

    `into` is an earlier one of the same store that nobody needs any more: its memory is used again,
    since touching new memory takes several times longer than the copy.
    """
    layout = store.layout
    optimizer = store.optimizer
    return Captured(
        store.version,
        _copy(layout, store.weights, into.weights if into else None),
        _copy(layout, store.averaged, into.averaged if into else None) if store.averaged is not None else None,
        optimizer.state(into.optimizer if into else None) if optimizer is not None else None,
    )


def _copy(layout: Layout, body: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is None:
        return body.clone()
    changing = slice(0, layout.exchange_bytes)  # frozen tensors are there since the first time
    into[changing].copy_(body[changing])
    return into


# ---- to files ----------------------------------------------------------------------------------


def tensors_of(
    captured: Captured, layout: Layout, optimizer: OptimizerSpec | None
) -> dict[FileName, dict[str, torch.Tensor]]:
    """The tensors of each file of a snapshot, by name; they share `captured`'s memory, but for aliases."""
    files: dict[FileName, dict[str, torch.Tensor]] = {WEIGHTS: _model_tensors(layout, captured.weights)}
    if captured.averaged is not None:
        files[AVERAGED] = _model_tensors(layout, captured.averaged)
    if captured.optimizer is not None and optimizer is not None:
        state = _state_tensors(layout, optimizer, captured.optimizer)
        if state:
            files[OPTIMIZER] = state
    return files


def manifest_of(captured: Captured, layout: Layout, optimizer: OptimizerSpec | None, **facts: Any) -> Manifest:
    """The manifest of a snapshot; `facts` are its other fields: run, server_incarnation, mode, policy, steps,
    num_joins, training, seed, share, paramserver_version."""
    state = captured.optimizer
    return Manifest(
        version=captured.version,
        tensors=tensor_entries(layout),
        optimizer=optimizer_entry(optimizer) if optimizer is not None else None,
        hyperparameters=tuple(state.hyperparameters) if state is not None else None,
        scalars=tuple(sorted({key for group in state.scalars for key in group})) if state is not None else (),
        **facts,
    )


def _model_tensors(layout: Layout, body: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    for spec, tensor in layout.views(body):
        found[spec.name] = tensor
        for alias in spec.aliases:
            found[alias] = tensor.clone()  # safetensors has no two names for one tensor
    return found


def _state_tensors(layout: Layout, optimizer: OptimizerSpec, state: OptimizerState) -> dict[str, torch.Tensor]:
    entries = _entries(layout)
    found = {}
    for members, keys, scalars in zip(members_of(layout, optimizer), state.keys, state.scalars, strict=True):
        for spec in members:
            for key in keys:
                found[f"{key}/{spec.name}"] = _view(entries[spec.name], state.bodies[key])
            for key, value in scalars.items():
                found[f"{key}/{spec.name}"] = value.clone()
    return found


# ---- and back ------------------------------------------------------------------------------------


def restore(store: Store, loaded: Loaded) -> None:
    """Make `store`, built from `loaded.layout` and `loaded.optimizer`, what it was when it was captured.

    Where the run has changed its mode, there may be an optimizer without state or state without an
    optimizer: the one starts fresh, the other is left out. The same holds for the Polyak average, which
    starts at the weights. Raises CheckpointError for another model or optimizer.
    """
    differences = loaded.layout.differences(store.layout)
    if differences:
        raise CheckpointError(f"snapshot {loaded.path} is of another model: " + "; ".join(differences))
    _fill(store.layout, store.weights, loaded.weights)
    if store.averaged is not None:
        _fill(store.layout, store.averaged, loaded.averaged or loaded.weights)
    if store.optimizer is not None and loaded.manifest.hyperparameters is not None:
        name, groups = type(store.optimizer.torch).__name__, store.optimizer.torch.param_groups
        spec = loaded.optimizer
        if spec is None or spec.name.lower() != name.lower() or len(spec.groups) != len(groups):
            raise CheckpointError(
                f"snapshot {loaded.path} has the state of {spec.name if spec else 'no optimizer'}, the run uses {name}",
                fix="resume with the optimizer the run was started with",
            )
        store.optimizer.set_state(_state_of(loaded, spec))
    store.version = loaded.manifest.version


def _fill(layout: Layout, body: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    for spec, view in layout.views(body):
        view.copy_(tensors[spec.name])


def _state_of(loaded: Loaded, spec: OptimizerSpec) -> OptimizerState:
    """The optimizer's state as bodies again."""
    entries, scalars = _entries(loaded.layout), set(loaded.manifest.scalars)
    state = OptimizerState([dict(values) for values in loaded.manifest.hyperparameters or ()])
    for members in members_of(loaded.layout, spec):
        keys = set(state_keys(members, loaded.state))
        state.keys.append(keys - scalars)
        state.scalars.append({key: loaded.state[f"{key}/{members[0].name}"] for key in keys & scalars})
        for key in keys - scalars:
            for tensor in members:
                view = _view(entries[tensor.name], state.body(key, loaded.layout))
                view.copy_(loaded.state[f"{key}/{tensor.name}"])
    return state


def _entries(layout: Layout) -> dict[str, Entry]:
    return {entry.spec.name: entry for entry in layout.entries}


def _view(entry: Entry, body: torch.Tensor) -> torch.Tensor:
    return body[entry.offset : entry.end].view(DTYPES[entry.spec.dtype]).view(entry.spec.shape)
