"""What a snapshot's manifest.json says, and whether the tensors beside it are what it says.

With the manifest alone a server knows the model, the optimizer and where every rank was, and needs no
worker to tell it. Everything is read strictly: a snapshot may come from anywhere, and whatever is wrong
with it is one sentence, never a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from ...common.errors import CheckpointError, ParamServerError
from ...common.tensors.layout import DTYPES, Kind, Layout, TensorSpec
from ...common.tensors.optimizers import GroupSpec, OptimizerSpec, apply_hyperparameters, build_optimizer

FORMAT = 1

WEIGHTS: Final = "weights.safetensors"
AVERAGED: Final = "averaged.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
FileName = Literal["weights.safetensors", "averaged.safetensors", "optimizer.safetensors"]
KindName = Literal["PARAMETER", "BUFFER", "FROZEN"]
# Of each file, its tensors by name.
Files = Mapping[FileName, Mapping[str, torch.Tensor]]

_NOT_FROM_FILES = {"params", "fused", "foreach", "capturable", "differentiable"}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class TensorEntry(_Entry):
    """A TensorSpec."""

    name: str
    kind: KindName
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


class GroupEntry(_Entry):
    """A GroupSpec: as the run began with it."""

    tensors: tuple[str, ...]
    hyperparameters: dict[str, JsonValue]


class OptimizerEntry(_Entry):
    """An OptimizerSpec."""

    name: str
    groups: tuple[GroupEntry, ...]


class FileEntry(_Entry):
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ShareEntry(_Entry):
    """Of a server of several shards: which one this is, and the model all of them hold."""

    shard: int = Field(ge=0)
    shards: int = Field(ge=2)
    tensors: tuple[TensorEntry, ...]
    optimizer: OptimizerEntry | None


class Manifest(_Entry):
    """One moment of a run. `write` fills in `files`; the rest is its caller's, see `manifest_of`."""

    model_config = ConfigDict(populate_by_name=True)

    format: Literal[1] = 1
    run: str = Field(description="its name")
    server_incarnation: int = Field(ge=0, lt=2**63)
    version: int = Field(ge=0, lt=2**63)
    mode: str
    policy: dict[str, JsonValue] = Field(default_factory=dict, description="the policy's own state; as it begins: none")
    contributions: dict[int, int] = Field(alias="steps", description="of each rank, how many are in the weights")
    num_joins: dict[int, int] = Field(description="newest incarnation of each rank")
    training: dict[str, JsonValue] = Field(description="whatever else the server wants to know again")
    tensors: tuple[TensorEntry, ...] = Field(description="in the model's order")
    optimizer: OptimizerEntry | None = Field(description="the server's, or what its workers run")
    hyperparameters: tuple[dict[str, JsonValue], ...] | None = Field(
        description="of each group now, schedules change them; none where workers run the optimizer"
    )
    scalars: tuple[str, ...] = Field((), description="optimizer state with one value per parameter, as step")
    seed: int
    share: ShareEntry | None = Field(None, description="none: the tensors are the whole model")
    paramserver_version: str
    written_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    files: dict[FileName, FileEntry] = Field(default_factory=dict)


def tensor_entries(layout: Layout) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(name=s.name, kind=cast(KindName, s.kind.name), dtype=s.dtype, shape=s.shape, aliases=s.aliases)
        for s in layout.specs
    )  # fmt: skip


def optimizer_entry(spec: OptimizerSpec) -> OptimizerEntry:
    groups = tuple(GroupEntry(tensors=g.tensors, hyperparameters=g.hyperparameters) for g in spec.groups)
    return OptimizerEntry(name=spec.name, groups=groups)


# ---- reading ---------------------------------------------------------------------------------------


def read_manifest(text: bytes) -> Manifest:
    """Raises CheckpointError that names the first thing wrong."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("format",):
            raise CheckpointError(
                f"it has format {first['input']!r}, this version of paramserver reads format {FORMAT}",
                fix="resume with the version of paramserver that wrote it",
            ) from None
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"its manifest is damaged: {where + ': ' if where else ''}{first['msg']}") from None


def layout_of(manifest: Manifest) -> Layout:
    """The tensors it holds. Raises CheckpointError for a model that cannot be."""
    return _layout(manifest.tensors)


def whole_of(
    manifest: Manifest, layout: Layout, optimizer: OptimizerSpec | None
) -> tuple[Layout, OptimizerSpec | None]:
    """The model and optimizer of the run, of which `layout` and `optimizer` are this shard's share."""
    share = manifest.share
    if share is None:
        return layout, optimizer
    whole = _layout(share.tensors)
    return whole, _optimizer(share.optimizer, whole)


def _layout(entries: tuple[TensorEntry, ...]) -> Layout:
    try:
        return Layout(
            TensorSpec(entry.name, Kind[entry.kind], entry.dtype, entry.shape, entry.aliases) for entry in entries
        )
    except ParamServerError as error:
        raise CheckpointError(error.message) from None


def optimizer_of(manifest: Manifest, layout: Layout) -> OptimizerSpec | None:
    """The optimizer, if any. Raises CheckpointError for one that is not of this model."""
    spec = _optimizer(manifest.optimizer, layout)
    if spec is not None and manifest.hyperparameters is not None and len(manifest.hyperparameters) != len(spec.groups):
        raise CheckpointError(f"hyperparameters of {len(manifest.hyperparameters)} groups for {len(spec.groups)}")
    return spec


def _optimizer(entry: OptimizerEntry | None, layout: Layout) -> OptimizerSpec | None:
    if entry is None:
        return None
    spec = OptimizerSpec(entry.name, tuple(GroupSpec(g.tensors, dict(g.hyperparameters)) for g in entry.groups))
    trained = {tensor.name for tensor in layout.specs if tensor.kind is Kind.PARAMETER}
    for name in (name for group in spec.groups for name in group.tensors):
        if name not in trained:
            raise CheckpointError(f"the optimizer's tensor '{name}' is no parameter of the model, or named twice")
        trained.remove(name)
    return spec


def check_tensors(manifest: Manifest, layout: Layout, optimizer: OptimizerSpec | None, files: Files) -> None:
    """Raises CheckpointError unless `files` hold exactly the tensors that the manifest promises."""
    if WEIGHTS not in files:
        raise CheckpointError(f"it has no {WEIGHTS}")
    _check_model(WEIGHTS, layout, files[WEIGHTS])
    if AVERAGED in files:
        _check_model(AVERAGED, layout, files[AVERAGED])
    if OPTIMIZER in files:
        if optimizer is None or manifest.hyperparameters is None:
            raise CheckpointError(f"it has an {OPTIMIZER} and no optimizer of the server")
        _check_state(manifest, layout, optimizer, files[OPTIMIZER])
    if optimizer is not None and manifest.hyperparameters is not None:
        _try_out(manifest, layout, optimizer, files.get(OPTIMIZER, {}))


def _check_model(file: str, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    expected = {name: spec for spec in layout.specs for name in (spec.name, *spec.aliases)}
    _check_names(file, set(expected), set(tensors))
    for name, spec in expected.items():
        _check_tensor(file, name, tensors[name], DTYPES[spec.dtype], spec.shape)


def _check_state(
    manifest: Manifest, layout: Layout, optimizer: OptimizerSpec, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Every parameter of a group has the same state, of its own shape or one value that all of them share."""
    expected = set()
    for members in members_of(layout, optimizer):
        for key in state_keys(members, tensors):
            is_scalar = key in manifest.scalars
            first = tensors[f"{key}/{members[0].name}"]
            for spec in members:
                name = f"{key}/{spec.name}"
                expected.add(name)
                tensor = tensors.get(name)
                if tensor is None:
                    continue  # said below
                dtype = first.dtype if is_scalar else DTYPES[spec.dtype]
                _check_tensor(OPTIMIZER, name, tensor, dtype, () if is_scalar else spec.shape)
                if is_scalar and not torch.equal(tensor, first):
                    raise CheckpointError(f"{OPTIMIZER}: '{key}' differs between parameters of one group")
    _check_names(OPTIMIZER, expected, set(tensors))


def members_of(layout: Layout, optimizer: OptimizerSpec) -> list[list[TensorSpec]]:
    """The tensors of each group that have elements, and so state."""
    specs = {spec.name: spec for spec in layout.specs if spec.num_elements}
    return [[specs[name] for name in group.tensors if name in specs] for group in optimizer.groups]


def state_keys(members: list[TensorSpec], state: Mapping[str, torch.Tensor]) -> list[str]:
    """What a group's optimizer state consists of, e.g. exp_avg, exp_avg_sq, step; `state` is `<key>/<parameter>`."""
    parts = [full.partition("/") for full in state] if members else []
    return [key for key, _, name in parts if name == members[0].name]


def _check_names(file: str, expected: set[str], got: set[str]) -> None:
    for name in sorted(expected - got):
        raise CheckpointError(f"{file} has no tensor '{name}'")
    for name in sorted(got - expected):
        raise CheckpointError(f"{file} has a tensor '{name}' that the manifest does not know")


def _check_tensor(file: str, name: str, got: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (got.dtype, tuple(got.shape)) != (dtype, shape):
        raise CheckpointError(
            f"{file}: tensor '{name}' is {got.dtype} {list(got.shape)}, the manifest says {dtype} {list(shape)}"
        )


def _try_out(manifest: Manifest, layout: Layout, optimizer: OptimizerSpec, state: Mapping[str, torch.Tensor]) -> None:
    """Go on from the snapshot for one step with one number in each group, in the way a store would."""
    hyperparameters = manifest.hyperparameters or ()
    groups: list[dict[str, Any]] = []
    for group, now in zip(optimizer.groups, hyperparameters, strict=True):
        for key in sorted(_NOT_FROM_FILES & (group.hyperparameters.keys() | now.keys())):
            raise CheckpointError(f"'{key}' is no hyperparameter")
        groups.append({"params": [torch.nn.Parameter(torch.zeros(1))], **group.hyperparameters})
    try:
        stepped = build_optimizer(optimizer.name, groups)
        members = members_of(layout, optimizer)
        for torch_group, now, tensors in zip(stepped.param_groups, hyperparameters, members, strict=True):
            apply_hyperparameters(torch_group, dict(now))
            parameter = torch_group["params"][0]
            parameter.grad = torch.ones(1)
            found = {
                key: state[f"{key}/{tensors[0].name}"].clone() if key in manifest.scalars else torch.zeros(1)
                for key in state_keys(tensors, state)
            }
            if found:
                stepped.state[parameter] = found
        stepped.step()
    except Exception as error:  # torch's classes fail in their own ways on what they do not expect
        raise CheckpointError(f"optimizer {optimizer.name} cannot go on from it: {error!r}") from None
