"""The state of a store: copied while training waits, given a name tensor by tensor, put back.

`capture` runs on the tensor thread between two commits and is one copy of memory; everything slower works on what it
returns. State is kept per tensor of the model, so a store that cuts the model into other windows can take it up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...common.errors import CheckpointError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from ..tensors.flat_optimizer import GroupState, OptimizerState, TensorState
from ..tensors.model import Model
from ..tensors.store import Store
from .manifest import (
    AVERAGED,
    MASTER,
    OPTIMIZER,
    TABLES,
    WEIGHTS,
    FileName,
    Files,
    Loaded,
    Manifest,
    SavedState,
    Tensors,
    check_state,
    keys_by_name,
    members_of,
)


@dataclass
class Captured:
    """A store between two commits. `payloads` are those of weights, master weights and average.

    Weights are uint8 [layout.total_bytes]. The others have the layout `stepped`, which is another one if there are
    master weights.
    """

    version: int
    stepped: Layout
    payloads: dict[FileName, torch.Tensor]
    optimizer: OptimizerState | None
    tables: Tensors = field(default_factory=dict)


def capture(store: Store, into: Captured | None = None) -> Captured:
    """A copy of everything that commits change.

    `into` is an earlier copy of the same store that nobody needs any more. Its memory is used again, since touching new
    memory takes several times longer than the copy.
    """
    payloads: dict[FileName, torch.Tensor] = {WEIGHTS: store.weights}
    if store.averaged is not None:
        payloads[AVERAGED] = store.averaged
    if store.master is not None:
        payloads[MASTER] = store.master.weights
    if into is None:
        copies = {file: payload.clone() for file, payload in payloads.items()}
    else:
        copies = into.payloads
        for file, payload in payloads.items():
            layout = store.layout if file == WEIGHTS else store.step_layout
            changing = slice(0, layout.exchange_bytes)  # frozen tensors are there since the first time
            copies[file][changing].copy_(payload[changing])
    optimizer = store.optimizer.state(into.optimizer if into else None) if store.optimizer is not None else None
    tables = store.tables.state(into.tables if into else None) if store.tables is not None else {}
    return Captured(store.version, store.step_layout, copies, optimizer, tables)


def tensors_of(captured: Captured, layout: Layout, optimizer: OptimizerSpec | None) -> Files:
    """The tensors of each file of a snapshot, by name; they share `captured`'s memory, but for aliases."""
    payloads, stepped = captured.payloads, captured.stepped
    files: dict[FileName, Tensors] = {WEIGHTS: _named(layout, payloads[WEIGHTS])}
    if AVERAGED in payloads:  # frozen tensors have no master weights
        files[AVERAGED] = {**(files[WEIGHTS] if MASTER in payloads else {}), **_named(stepped, payloads[AVERAGED])}
    if MASTER in payloads:
        dtypes = {spec.name: spec.dtype for spec in layout.specs}
        masters = stepped.views(payloads[MASTER])
        files[MASTER] = {spec.name: tensor for spec, tensor in masters if spec.dtype != dtypes[spec.name]}
    if captured.optimizer is not None and optimizer is not None:
        files[OPTIMIZER] = _state_tensors(stepped, optimizer, captured.optimizer)
    files[TABLES] = captured.tables
    return {file: tensors for file, tensors in files.items() if tensors}


def _named(layout: Layout, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a payload by all their names. Only the first shares its memory: safetensors refuses two names."""
    return {
        name: tensor if name == spec.name else tensor.clone()
        for spec, tensor in layout.views(payload)
        for name in (spec.name, *spec.aliases)
    }


def manifest_of(captured: Captured, layout: Layout, optimizer: OptimizerSpec | None, **fields: Any) -> Manifest:
    """The manifest of a snapshot. `fields` are its other fields: outer, run, server_incarnation, mode, policy,
    contributions, num_joins, training, seed, share, paramserver_version."""
    groups = captured.optimizer.groups if captured.optimizer is not None else []
    return Manifest(
        version=captured.version,
        tensors=layout.specs,
        optimizer=optimizer,
        hyperparameters=tuple(group.hyperparameters for group in groups) or None,
        scalars=tuple(sorted({key for group in groups for tensor in group.tensors.values() for key in tensor.scalars})),
        **fields,
    )


def _state_tensors(layout: Layout, optimizer: OptimizerSpec, state: OptimizerState) -> dict[str, torch.Tensor]:
    """The optimizer's state as `<key>/<parameter>`."""
    tensors: dict[str, torch.Tensor] = {}
    for members, group in zip(members_of(layout, optimizer), state.groups, strict=True):
        for entry in members:
            keys, scalars = group.tensors[entry.spec.name]
            tensors |= {f"{key}/{entry.spec.name}": entry.view(state.payloads[key]) for key in keys}
            tensors |= {f"{key}/{entry.spec.name}": value.clone() for key, value in scalars.items()}
    return tensors


def optimizer_tensors(model: Model) -> tuple[int, dict[str, torch.Tensor]]:
    """The version, and the state of the optimizer here at it, as `<key>/<parameter>`; copies."""
    store, optimizer = model.store, model.running
    if store.optimizer is None or optimizer is None:
        return store.version, {}
    return store.version, _state_tensors(store.step_layout, optimizer, store.optimizer.state())


def read_optimizer(model: Model, payload: bytes) -> OptimizerState | None:
    """The state of a worker's optimizer, from a safetensors file of such tensors; None where it cannot be kept here.
    CheckpointError for a state that this optimizer cannot have."""
    layout, optimizer = model.layout, model.running
    if optimizer is None:
        return None
    try:
        tensors = load(payload)
    except SafetensorError as error:
        raise CheckpointError(f"no safetensors file: {error}") from None
    keys = {full.partition("/")[0] for full in tensors}
    # In a model whose parameters are all of one value, only "step" is told from elementwise state.
    has_shapes = any(entry.spec.shape for group in members_of(layout, optimizer) for entry in group)
    large = {full.partition("/")[0] for full, tensor in tensors.items() if tensor.dim()}
    scalars = tuple(sorted(key for key in keys - large if key == "step" or has_shapes))
    saved = SavedState(optimizer, tuple(group.hyperparameters for group in optimizer.groups), scalars, tensors)
    check_state(layout, saved)
    # The hyperparameters come with the contribution.
    return _state_from(layout, saved._replace(hyperparameters=({},) * len(optimizer.groups)))


def restore(store: Store, loaded: Loaded, is_outer: bool = False) -> None:
    """Make `store`, built from the layout and the optimizer that were loaded, what it was when it was captured.

    Where the run has changed its mode, an optimizer without state starts fresh, and state without an optimizer is left
    out. A missing Polyak average starts at the weights. The state of the workers' optimizer is not given to an outer
    one (`is_outer`: the store has an outer optimizer), or the other way round. Raises CheckpointError for another model
    or optimizer.
    """
    if differences := loaded.layout.differences(store.layout):
        raise CheckpointError(f"snapshot {loaded.path} is of another model: " + "; ".join(differences))
    manifest, weights = loaded.manifest, loaded.files[WEIGHTS]
    _fill(store.layout, store.weights, weights)
    masters = {**weights, **loaded.files.get(MASTER, {})}
    if store.master is not None:
        _fill(store.step_layout, store.master.weights, masters)
    if store.averaged is not None:
        _fill(store.step_layout, store.averaged, loaded.files.get(AVERAGED, masters))
    is_same_kind = is_outer == (manifest.outer is not None)
    if store.optimizer is not None and manifest.hyperparameters is not None and is_same_kind:
        name, groups = store.optimizer.name, store.optimizer.torch.param_groups
        spec = manifest.outer or manifest.optimizer
        if spec is None or spec.name.lower() != name.lower() or len(spec.groups) != len(groups):
            known = spec.name if spec else "no optimizer"
            delay = ", and with policy.outer_delay or without it as it was" if is_outer else ""
            fix = f"resume with the optimizer the run was started with{delay}"
            raise CheckpointError(f"snapshot {loaded.path} has the state of {known}, the run uses {name}", fix=fix)
        saved = SavedState(spec, manifest.hyperparameters, manifest.scalars, loaded.state)
        store.optimizer.set_state(_state_from(store.step_layout, saved))
    if store.tables is not None:
        try:
            store.tables.set_state(loaded.files.get(TABLES, {}))
        except ValueError as error:
            raise CheckpointError(f"snapshot {loaded.path}: {TABLES}: {error}") from None
    store.version = manifest.version


def _fill(layout: Layout, payload: torch.Tensor, tensors: Tensors) -> None:
    for spec, view in layout.views(payload):
        view.copy_(tensors[spec.name])


def _state_from(layout: Layout, saved: SavedState) -> OptimizerState:
    """The optimizer's state as payloads again."""
    _, _, scalars, tensors = saved
    state, keys = OptimizerState(), keys_by_name(tensors)
    for members, hyperparameters in zip(members_of(layout, saved.optimizer), saved.hyperparameters, strict=True):
        group = GroupState(dict(hyperparameters), {})
        state.groups.append(group)
        for entry in members:
            name = entry.spec.name
            found = keys.get(name, frozenset())
            values = {key: tensors[f"{key}/{name}"] for key in found.intersection(scalars)}
            group.tensors[name] = TensorState(found.difference(scalars), values)
            for key in found.difference(scalars):
                entry.view(state.payload(key, layout)).copy_(tensors[f"{key}/{name}"])
    return state
