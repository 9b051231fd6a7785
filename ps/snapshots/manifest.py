"""A snapshot's files: manifest.json, the check that its tensors match it, writing and loading.

The manifest contains the model, the optimizer and the position of every rank. It is read strictly, because a snapshot
may come from anywhere. Every error in it is one sentence, never a traceback.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...common.errors import CheckpointError, ParamServerError
from ...common.tensors.layout import DTYPES, Entry, Kind, Layout, TensorSpec
from ...common.tensors.optimizers import (
    NOT_HYPERPARAMETERS,
    Hyperparameters,
    JointOptimizer,
    OptimizerSpec,
    apply_hyperparameters,
    check_hyperparameters,
)
from ..core.state import MOST_LR_SCALE
from ..tensors.master import NARROW
from ..tensors.model import check_table
from .common import RUN_NAME, States
from .files import MANIFEST, cannot_write, new_snapshot, sha256_of, sync, writing_to

WEIGHTS: Final = "weights.safetensors"
AVERAGED: Final = "averaged.safetensors"
MASTER: Final = "master.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
TABLES: Final = "tables.safetensors"
FileName = Literal[
    "weights.safetensors", "averaged.safetensors", "master.safetensors", "optimizer.safetensors", "tables.safetensors"
]
_FIX = "resume from an older snapshot (--resume PATH), or start a new run with --resume never"
Tensors = Mapping[str, torch.Tensor]  # by name
Files = Mapping[FileName, Tensors]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


def state_file(rank: int) -> str:
    """Return the name of the file with the state of a rank's script."""
    return f"state-{rank}.safetensors"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class FileEntry(_Strict):
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ShareEntry(_Strict):
    """The number of the shard and the whole model, in a snapshot of one of several shards."""

    shard: int = Field(ge=0)
    shards: int = Field(ge=2)
    tensors: tuple[TensorSpec, ...]
    optimizer: OptimizerSpec | None


class Manifest(_Strict):
    """One moment of a run. `write` sets `files` and `states`, and `manifest_of` the other fields."""

    format: Literal[3] = 3
    run: str = Field(pattern=RUN_NAME, description="name of the run")
    server_incarnation: int = Field(ge=0, lt=2**63)
    version: int = Field(ge=0, lt=2**63)
    mode: str
    policy: dict[str, JsonValue] = Field(default_factory=dict, description="state of the policy; {}: its initial state")
    rows: dict[int, tuple[_Count, _Count, _Count | None, _Count, _Count]] = Field(
        description="of each rank, what the weights have: seq, steps, samples, batches, part (`Row`)"
    )
    num_joins: dict[int, int] = Field(description="newest incarnation of each rank")
    training: dict[str, JsonValue] = Field(description="other state of the server")
    tensors: tuple[TensorSpec, ...] = Field(description="tensors in the model's order")
    optimizer: OptimizerSpec | None = Field(description="the workers' optimizer, whether it runs here or in workers")
    outer: OptimizerSpec | None = Field(
        None, description="the server's outer optimizer; hyperparameters and scalars then belong to it"
    )
    hyperparameters: tuple[dict[str, JsonValue], ...] | None = Field(
        description="present values of each group, which schedules may change; none if workers run the optimizer"
    )
    scalars: tuple[str, ...] = Field((), description="keys of optimizer state with one value per parameter, as step")
    seed: int
    share: ShareEntry | None = Field(None, description="none: the tensors are the whole model")
    paramserver_version: str
    written_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    files: dict[FileName, FileEntry] = Field(default_factory=dict)
    states: dict[int, FileEntry] = Field(default_factory=dict, description="of ranks' scripts, in `state_file`")


class SavedState(NamedTuple):
    """An optimizer's state in a file."""

    optimizer: OptimizerSpec
    hyperparameters: tuple[Hyperparameters, ...]  # the present ones, of each group
    scalars: tuple[str, ...]  # keys with one value for a parameter
    tensors: Tensors  # by <key>/<parameter>


def read_manifest(text: bytes) -> Manifest:
    """Return the manifest in `text`. Raises CheckpointError, which names the first mistake."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("format",):
            problem = f"it has format {first['input']!r}, this version of paramserver reads format 3"
            raise CheckpointError(problem, fix="resume with the version of paramserver that wrote it") from None
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"its manifest is damaged: {where + ': ' if where else ''}{first['msg']}") from None


def layout_of(tensors: tuple[TensorSpec, ...], optimizer: OptimizerSpec | None) -> Layout:
    """Return the layout of these tensors. Raises CheckpointError for an impossible model, or another's optimizer."""
    try:
        layout = Layout(tensors)
    except ParamServerError as error:
        raise CheckpointError(error.message) from None
    trained = {tensor.name for tensor in tensors if tensor.kind is Kind.PARAMETER}
    for name in (name for group in (optimizer.groups if optimizer else ()) for name in group.tensors):
        if name not in trained:
            raise CheckpointError(f"the optimizer's tensor '{name}' is not a parameter of the model, or is named twice")
        trained.remove(name)
    return layout


def check_tensors(manifest: Manifest, layout: Layout, files: Files) -> None:
    """Raise CheckpointError unless `files` have exactly the tensors that the manifest describes."""
    if WEIGHTS not in files:
        raise CheckpointError(f"it has no {WEIGHTS}")
    stepped = _stepped(layout, files)
    described: dict[FileName, Layout] = {WEIGHTS: layout, AVERAGED: stepped}
    for file, of_file in described.items():
        if file in files:
            named = [(name, spec) for spec in of_file.specs for name in (spec.name, *spec.aliases)]
            _check_shapes(file, {name: (DTYPES[spec.dtype], spec.shape) for name, spec in named}, files[file])
    optimizer, hyperparameters = manifest.outer or manifest.optimizer, manifest.hyperparameters
    if optimizer is not None and hyperparameters is not None:
        if len(hyperparameters) != len(optimizer.groups):
            raise CheckpointError(f"hyperparameters of {len(hyperparameters)} groups for {len(optimizer.groups)}")
        check_state(stepped, SavedState(optimizer, hyperparameters, manifest.scalars, files.get(OPTIMIZER, {})))
        try:
            for name, group, now in zip(optimizer.classes, optimizer.groups, hyperparameters, strict=True):
                check_hyperparameters(name, group.hyperparameters)
                check_hyperparameters(name, now)
            for table in optimizer.tables:
                check_table(table)
        except ParamServerError as error:
            raise CheckpointError(error.message, fix=_FIX) from None
    elif OPTIMIZER in files:
        raise CheckpointError(f"it has an {OPTIMIZER} and no optimizer of the server")
    controls = manifest.training.get("controls")
    scale = controls.get("lr_scale", 1.0) if isinstance(controls, dict) else 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale <= MOST_LR_SCALE:
        raise CheckpointError(f"its lr_scale is {scale!r:.40}; the range is 0 to {MOST_LR_SCALE:g}", fix=_FIX)
    check_finite(layout, files)


def _stepped(layout: Layout, files: Files) -> Layout:
    """Return the layout with the dtypes of the master weights. Raises CheckpointError for wrong master weights."""
    if MASTER not in files:
        return layout
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for spec in layout.specs:
        has_master = spec.kind is Kind.PARAMETER or (spec.kind is Kind.BUFFER and spec.name in files[MASTER])
        if spec.dtype in NARROW and has_master:
            expected[spec.name] = torch.float32, spec.shape
    _check_shapes(MASTER, expected, files[MASTER])
    return Layout(replace(spec, dtype="float32") if spec.name in expected else spec for spec in layout.specs)


def check_finite(layout: Layout, files: Files) -> None:
    """Raise CheckpointError, which names the first tensor with NaN or infinity, since no run can resume from it.

    Frozen tensors may have them, because nothing changes these tensors, and a mask may contain -inf.
    """
    trained = {name for spec in layout.specs if spec.kind is not Kind.FROZEN for name in (spec.name, *spec.aliases)}
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel() and (name in trained or file not in (WEIGHTS, AVERAGED)):
                least, most = tensor.aminmax()  # one pass without further memory; both are NaN if any value is
                if not (math.isfinite(least) and math.isfinite(most)):
                    wrong = tensor[~torch.isfinite(tensor)]
                    problem = f"{wrong.numel()} of {tensor.numel()} numbers, the first is {wrong[0].item()}"
                    raise CheckpointError(f"{file}: tensor '{name}' is not finite: {problem}", fix=_FIX)


def check_state(layout: Layout, saved: SavedState) -> None:
    """Raise CheckpointError unless the optimizer can continue from its saved state.

    All parameters of a group that were stepped must have the same keys. The state of a key has the parameter's shape,
    or one value for keys in `scalars`.
    """
    groups, keys, state = members_of(layout, saved.optimizer), keys_by_name(saved.tensors), saved.tensors
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for members in groups:
        stepped = [entry.spec for entry in members if entry.spec.name in keys]
        for key in keys[stepped[0].name] if stepped else ():
            first = state[f"{key}/{stepped[0].name}"].dtype
            for spec in stepped:
                is_scalar = key in saved.scalars
                expected[f"{key}/{spec.name}"] = (first, ()) if is_scalar else (DTYPES[spec.dtype], spec.shape)
    _check_shapes(OPTIMIZER, expected, state)
    _try_out(saved, groups)


def members_of(layout: Layout, optimizer: OptimizerSpec) -> list[list[Entry]]:
    """Return the tensors of each group, without empty tensors, which have no state."""
    entries = {entry.spec.name: entry for entry in layout.entries if entry.spec.num_elements}
    return [[entries[name] for name in group.tensors if name in entries] for group in optimizer.groups]


def keys_by_name(state: Tensors) -> dict[str, frozenset[str]]:
    """Return the keys of each tensor's optimizer state, such as exp_avg. `state` is by `<key>/<parameter>`."""
    found: dict[str, frozenset[str]] = {}
    for full in state:
        key, _, name = full.partition("/")
        found[name] = found.get(name, frozenset()) | {key}
    return found


def _check_shapes(file: str, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], got: Tensors) -> None:
    """Raise CheckpointError unless the tensors of a file have exactly these names, dtypes and shapes."""
    for name in sorted(expected.keys() - got.keys()):
        raise CheckpointError(f"{file} has no tensor '{name}'")
    for name in sorted(got.keys() - expected.keys()):
        raise CheckpointError(f"{file} has a tensor '{name}' that the manifest does not know")
    for name, (dtype, shape) in expected.items():
        if (got[name].dtype, tuple(got[name].shape)) != (dtype, shape):
            found = f"{got[name].dtype} {list(got[name].shape)}, the manifest says {dtype} {list(shape)}"
            raise CheckpointError(f"{file}: tensor '{name}' is {found}")


def _try_out(saved: SavedState, groups: list[list[Entry]]) -> None:
    """Try one step from the snapshot's state, with a parameter of one element in each group."""
    optimizer, hyperparameters, scalars, state = saved
    for group, now in zip(optimizer.groups, hyperparameters, strict=True):
        for key in sorted(NOT_HYPERPARAMETERS & (group.hyperparameters.keys() | now.keys())):
            raise CheckpointError(f"'{key}' is not a hyperparameter")
    numbers, keys = [torch.nn.Parameter(torch.zeros(1)) for _ in groups], keys_by_name(state)
    of_groups = zip(numbers, optimizer.groups, strict=True)
    try:
        trial = JointOptimizer(
            optimizer.classes, [{"params": [number], **group.hyperparameters} for number, group in of_groups]
        )
        for number, torch_group, now, members in zip(numbers, trial.param_groups, hyperparameters, groups, strict=True):
            apply_hyperparameters(torch_group, now)
            number.grad = torch.ones(1)
            name = next((entry.spec.name for entry in members if entry.spec.name in keys), "")
            if name:
                trial.state[number] = {
                    key: state[f"{key}/{name}"].clone() if key in scalars else torch.zeros(1) for key in keys[name]
                }
        trial.step()
    except Exception as error:  # torch's classes fail in their own ways on an unexpected state
        raise CheckpointError(f"optimizer {optimizer.name} cannot continue from it: {error!r}") from None


# ---- writing and loading -------------------------------------------------------------------------
# Writes a snapshot completely or not at all, and verifies it when it is loaded.
#
#     snapshot-000000001200-3/
#         weights.safetensors     by name, as `model.load_state_dict(load_file(path))` takes them
#         averaged.safetensors    the Polyak average, if one is kept
#         master.safetensors      float32 values of 16-bit weights, if they are kept (`ps/tensors/master.py`)
#         optimizer.safetensors   `exp_avg/<parameter>` and so on, if the server's optimizer has a state
#         tables.safetensors      `weight/<table>` and the optimizer state of its rows, if the run has tables
#         state-0.safetensors     the state of rank 0's script (`session.state`), as its worker sent it
#         manifest.json           everything else, with size and SHA-256 of each file above
#         manifest.json.sha256    as `sha256sum -c` takes it
#
# These functions do not know the store: `store_state.py` provides and restores the tensors. Call `write` on a
# background thread, because it waits for the disk. It computes hashes without the GIL.


_MANIFEST_HASH = MANIFEST + ".sha256"


class Written(NamedTuple):
    """A snapshot on the disk. `sha256` is the hash of its weights."""

    path: Path
    sha256: str
    num_bytes: int


class Loaded(NamedTuple):
    """A verified snapshot of this shard's part of the model, with the layout of the whole model.

    The tensors share memory with the files, and the files' disk space is freed only with the last tensor. So copy the
    tensors, drop them, and never write to them.
    """

    path: Path
    manifest: Manifest
    layout: Layout
    whole: Layout
    whole_optimizer: OptimizerSpec | None
    files: Files
    states: States = MappingProxyType({})

    @property
    def state(self) -> Tensors:
        """The optimizer's state by `<key>/<parameter>`, which may be empty."""
        return self.files.get(OPTIMIZER, {})


def write(directory: Path, manifest: Manifest, files: Files, states: States = MappingProxyType({})) -> Written:
    """Write one snapshot, with the states of scripts by rank.

    When this returns, the snapshot is on the disk. A crash before leaves no snapshot. Raises CheckpointError if there
    is no space or no permission, if another process writes there, and for numbers that are not finite. Older snapshots
    stay unchanged.
    """
    try:
        check_finite(layout_of(manifest.tensors, None), files)
    except CheckpointError as error:
        problem = f"snapshot of version {manifest.version} not written, because no run could resume from it"
        fix = "lower the learning rate; older snapshots are unchanged"
        raise CheckpointError(f"{problem}: {error.message}", fix=fix) from None
    final = directory / f"snapshot-{manifest.version:012d}-{manifest.server_incarnation}"
    with writing_to(directory):
        try:
            with new_snapshot(final) as folder:
                entries = {name: _write(folder / name, tensors) for name, tensors in files.items()}
                written = {rank: _write(folder / state_file(rank), data) for rank, data in states.items()}
                text = manifest.model_copy(update={"files": entries, "states": written})
                content = text.model_dump_json(indent=1).encode()
                _write(folder / MANIFEST, content)
                _write(folder / _MANIFEST_HASH, _hash_line(content))
        except (OSError, SafetensorError) as error:  # for a full disk, safetensors has only a text and no errno
            num_bytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise cannot_write(directory, f"{why}, for {num_bytes / 1e6:.1f} MB") from None
    return Written(final, entries[WEIGHTS].sha256, sum(entry.num_bytes for entry in entries.values()))


def _write(path: Path, content: bytes | Tensors) -> FileEntry:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        # safetensors writes from the tensors' own memory, without the GIL. It makes files that only the owner may read.
        # The files get the directory's permissions instead.
        save_file(dict(content), path)
        path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return FileEntry(num_bytes=path.stat().st_size, sha256=sha256_of(path))


def _hash_line(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def load(path: Path, is_verified: bool = False) -> Loaded:
    """Load one snapshot, and verify every byte unless `is_verified`. Raises CheckpointError with the fault."""
    try:
        for name in (MANIFEST, _MANIFEST_HASH):
            if not (path / name).is_file():
                raise CheckpointError(f"it has no {name}")
        text = (path / MANIFEST).read_bytes()
        if (path / _MANIFEST_HASH).read_bytes() != _hash_line(text):
            problem = f"{MANIFEST} has changed since it was written: its SHA-256 differs from {_MANIFEST_HASH}"
            raise CheckpointError(problem)
        manifest = read_manifest(text)
        for file, entry in manifest.files.items():
            _check_file(path / file, entry, is_verified)
        for rank, entry in manifest.states.items():
            _check_file(path / state_file(rank), entry, is_verified)
        states = {rank: (path / state_file(rank)).read_bytes() for rank in manifest.states}
        files: Files = {name: load_file(path / name) for name in manifest.files}
        layout = layout_of(manifest.tensors, manifest.optimizer)
        check_tensors(manifest, layout, files)
        run = manifest.share or manifest
        whole = layout_of(run.tensors, run.optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"snapshot {path}: {error.message}", fix=error.fix) from None
    except OSError as error:
        raise CheckpointError(f"snapshot {path} cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        raise CheckpointError(f"snapshot {path}: not safetensors: {error}") from None
    return Loaded(path, manifest, layout, whole, run.optimizer, files, states)


def _check_file(path: Path, entry: FileEntry, is_verified: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"it has no {path.name}")
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise CheckpointError(f"{path.name} has {num_bytes} bytes, {entry.num_bytes} were written")
    if not is_verified and sha256_of(path) != entry.sha256:
        raise CheckpointError(f"{path.name} has changed since it was written: its SHA-256 differs from the manifest's")
