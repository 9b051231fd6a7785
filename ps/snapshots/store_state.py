"""The state of a store: copied while training waits, given a name tensor by tensor, put back.

`capture` runs on the tensor thread between two commits and is one copy of memory; everything slower works on what it
returns. State is kept per tensor of the model, so a store that cuts the model into other windows can take it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...common.errors import CheckpointError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import Hyperparameters, OptimizerSpec
from ..tensors.flat_optimizer import GroupState, OptimizerState, TensorState
from ..tensors.model import Model
from ..tensors.store import Store
from .checkpoint import Loaded
from .manifest import (
    AVERAGED,
    OPTIMIZER,
    TABLES,
    WEIGHTS,
    FileName,
    Files,
    Manifest,
    Tensors,
    check_state,
    keys_by_name,
    members_of,
)


@dataclass
class Captured:
    """A store between two commits. `payloads` are those of weights and average, uint8 [layout.total_bytes]."""

    version: int
    payloads: dict[FileName, torch.Tensor]
    optimizer: OptimizerState | None
    tables: Tensors = field(default_factory=dict)


def capture(store: Store, into: Captured | None = None) -> Captured:
    """A copy of everything that commits change.

    `into` is an earlier one of the same store that nobody needs any more: its memory is used again,
    since touching new memory takes several times longer than the copy.
    """
    payloads: dict[FileName, torch.Tensor] = {WEIGHTS: store.weights}
    if store.averaged is not None:
        payloads[AVERAGED] = store.averaged
    if into is None:
        copies = {file: payload.clone() for file, payload in payloads.items()}
    else:
        copies = into.payloads
        changing = slice(0, store.layout.exchange_bytes)  # frozen tensors are there since the first time
        for file, payload in payloads.items():
            copies[file][changing].copy_(payload[changing])
    optimizer = store.optimizer.state(into.optimizer if into else None) if store.optimizer is not None else None
    tables = store.tables.state(into.tables if into else None) if store.tables is not None else {}
    return Captured(store.version, copies, optimizer, tables)


def tensors_of(captured: Captured, layout: Layout, optimizer: OptimizerSpec | None) -> Files:
    """The tensors of each file of a snapshot, by name; they share `captured`'s memory, but for aliases."""
    files: dict[FileName, Tensors] = {}
    for file, payload in captured.payloads.items():
        files[file] = {
            name: tensor if name == spec.name else tensor.clone()  # safetensors has no two names for one tensor
            for spec, tensor in layout.views(payload)
            for name in (spec.name, *spec.aliases)
        }
    if captured.optimizer is not None and optimizer is not None:
        state = _state_tensors(layout, optimizer, captured.optimizer)
        if state:
            files[OPTIMIZER] = state
    if captured.tables:
        files[TABLES] = captured.tables
    return files


def manifest_of(captured: Captured, layout: Layout, optimizer: OptimizerSpec | None, **facts: Any) -> Manifest:
    """The manifest of a snapshot; `facts` are its other fields: outer, run, server_incarnation, mode, policy, steps
    (which count contributions), num_joins, training, seed, share, paramserver_version."""
    groups = captured.optimizer.groups if captured.optimizer is not None else []
    return Manifest(
        version=captured.version,
        tensors=layout.specs,
        optimizer=optimizer,
        hyperparameters=tuple(group.hyperparameters for group in groups) or None,
        scalars=tuple(sorted({key for group in groups for tensor in group.tensors.values() for key in tensor.scalars})),
        **facts,
    )


def _state_tensors(layout: Layout, optimizer: OptimizerSpec, state: OptimizerState) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for members, group in zip(members_of(layout, optimizer), state.groups, strict=True):
        for entry in members:
            keys, scalars = group.tensors[entry.spec.name]
            found |= {f"{key}/{entry.spec.name}": entry.view(state.payloads[key]) for key in keys}
            found |= {f"{key}/{entry.spec.name}": value.clone() for key, value in scalars.items()}
    return found


def optimizer_tensors(model: Model) -> tuple[int, dict[str, torch.Tensor]]:
    """The version, and what the optimizer here remembers at it, as `<key>/<parameter>`; copies."""
    store, layout, optimizer = model.store, model.layout, model.running
    if store.optimizer is None or layout is None or optimizer is None:
        return store.version, {}
    return store.version, _state_tensors(layout, optimizer, store.optimizer.state())


def read_optimizer(model: Model, payload: bytes) -> OptimizerState | None:
    """What a worker's optimizer remembers, from such tensors in a safetensors file; None where it cannot be kept
    here. CheckpointError for what is no state of it."""
    layout, optimizer = model.layout, model.running
    if layout is None or optimizer is None:
        return None
    try:
        tensors = load(payload)
    except SafetensorError as error:
        raise CheckpointError(f"no safetensors file: {error}") from None
    hyperparameters = tuple(group.hyperparameters for group in optimizer.groups)
    of_one: dict[str, bool] = {}  # by key: whether it is one value of every parameter
    for full, tensor in tensors.items():
        key, _, _ = full.partition("/")
        of_one[key] = of_one.get(key, True) and tensor.dim() == 0
    are_all_one = not any(entry.spec.shape for group in members_of(layout, optimizer) for entry in group)
    scalars = tuple(sorted(key for key, is_one in of_one.items() if is_one and (key == "step" or not are_all_one)))
    check_state(layout, optimizer, hyperparameters, scalars, tensors)
    return _state_from(tensors, scalars, layout, optimizer, [{} for _ in hyperparameters])  # those are told beside


def restore(store: Store, loaded: Loaded, is_outer: bool = False) -> None:
    """Make `store`, built from the layout and the optimizer that were loaded, what it was when it was captured.

    Where the run has changed its mode, there may be an optimizer without state or state without an optimizer: the one
    starts fresh, the other is left out; so with the Polyak average, which starts at the weights; and nothing of the
    workers' optimizer is taken for an outer one (`is_outer`: the store has such), or the other way round. Raises
    CheckpointError for another model or optimizer.
    """
    differences = loaded.layout.differences(store.layout)
    if differences:
        raise CheckpointError(f"snapshot {loaded.path} is of another model: " + "; ".join(differences))
    weights = loaded.files[WEIGHTS]
    _fill(store.layout, store.weights, weights)
    if store.averaged is not None:
        _fill(store.layout, store.averaged, loaded.files.get(AVERAGED, weights))
    outer = loaded.manifest.outer
    is_same_kind = is_outer == (outer is not None)
    if store.optimizer is not None and loaded.manifest.hyperparameters is not None and is_same_kind:
        name, groups = store.optimizer.name, store.optimizer.torch.param_groups
        spec = outer or loaded.manifest.optimizer
        if spec is None or spec.name.lower() != name.lower() or len(spec.groups) != len(groups):
            raise CheckpointError(
                f"snapshot {loaded.path} has the state of {spec.name if spec else 'no optimizer'}, the run uses {name}",
                fix="resume with the optimizer the run was started with"
                + (", and with policy.outer_delay or without it as it was" if is_outer else ""),
            )
        store.optimizer.set_state(_state_of(loaded, spec))
    if store.tables is not None:
        try:
            store.tables.set_state(loaded.files.get(TABLES, {}))
        except ValueError as error:
            raise CheckpointError(f"snapshot {loaded.path}: {TABLES}: {error}") from None
    store.version = loaded.manifest.version


def _fill(layout: Layout, payload: torch.Tensor, tensors: Tensors) -> None:
    for spec, view in layout.views(payload):
        view.copy_(tensors[spec.name])


def _state_of(loaded: Loaded, spec: OptimizerSpec) -> OptimizerState:
    manifest = loaded.manifest
    return _state_from(loaded.state, manifest.scalars, loaded.layout, spec, manifest.hyperparameters or ())


def _state_from(
    tensors: Tensors,
    of_one: Sequence[str],
    layout: Layout,
    spec: OptimizerSpec,
    hyperparameters_now: Sequence[Hyperparameters],
) -> OptimizerState:
    """The optimizer's state as payloads again; `of_one`: keys with one value for a parameter."""
    scalars, state = set(of_one), OptimizerState()
    groups = zip(members_of(layout, spec), hyperparameters_now, strict=True)
    keys = keys_by_name(tensors)
    for members, hyperparameters in groups:
        group = GroupState(dict(hyperparameters), {})
        state.groups.append(group)
        for entry in members:
            name, found = entry.spec.name, keys.get(entry.spec.name, frozenset())
            values = {key: tensors[f"{key}/{name}"] for key in found & scalars}
            group.tensors[name] = TensorState(found - scalars, values)
            for key in found - scalars:
                entry.view(state.payload(key, layout)).copy_(tensors[f"{key}/{name}"])
    return state
