"""Writes a snapshot completely or not at all, and verifies it when it is loaded.

    snapshot-000000001200-3/
        weights.safetensors     by name, as `model.load_state_dict(load_file(path))` takes them
        averaged.safetensors    the Polyak average, if one is kept
        master.safetensors      float32 values of 16-bit weights, if they are kept (`ps/tensors/master.py`)
        optimizer.safetensors   `exp_avg/<parameter>` and so on, if the server's optimizer has a state
        tables.safetensors      `weight/<table>` and the optimizer state of its rows, if the run has tables
        state-0.safetensors     the state of rank 0's script (`session.state`), as its worker sent it
        manifest.json           everything else, with size and SHA-256 of each file above
        manifest.json.sha256    as `sha256sum -c` takes it

This module does not know the store: `store_state.py` provides and restores the tensors. Call `write` on a background
thread, because it waits for the disk. It computes hashes without the GIL.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...common.errors import CheckpointError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
from .common import States
from .files import MANIFEST, cannot_write, new_snapshot, sha256_of, sync, writing_to
from .manifest import (
    OPTIMIZER,
    WEIGHTS,
    FileEntry,
    Files,
    Manifest,
    Tensors,
    check_finite,
    check_tensors,
    layout_of,
    read_manifest,
    state_file,
)

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
