"""Durable snapshots of a run: written whole, verified before use, the newest good one found.

    snapshot-000000001200-3/
        weights.safetensors     by name, as `model.load_state_dict(load_file(path))` takes them
        averaged.safetensors    the Polyak average, if one is kept
        optimizer.safetensors   `exp_avg/<parameter>` and so on, if the server has an optimizer that remembers
        state-0.safetensors     what rank 0's script remembers (`session.state`), as its worker sent it
        tables.safetensors      `weight/<table>` and the optimizer state of its rows, if the run has tables
    manifest.json           everything else, with size and SHA-256 of each file above
        manifest.json.sha256    as `sha256sum -c` takes it

Nothing here knows the store or the event loop: `ps/snapshots/store_state.py` gives and takes the tensors, and
`write` belongs on a background thread. It waits for the disk and computes hashes with the GIL free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...common.errors import CheckpointError
from ...common.tensors.layout import Layout
from ...common.tensors.optimizers import OptimizerSpec
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
    """A snapshot on the disk. `sha256` is that of its weights."""

    path: Path
    sha256: str
    num_bytes: int


class Loaded(NamedTuple):
    """A verified snapshot: of the model that lies here, and of the run's, which is the same in a server of one process.

    Tensors share memory with its files, whose space on the disk is free again when the last of them is gone: copy them,
    never write to them, and let go of them.
    """

    path: Path
    manifest: Manifest
    layout: Layout
    whole: Layout
    whole_optimizer: OptimizerSpec | None
    files: Files
    states: Mapping[int, bytes] = MappingProxyType({})  # by rank

    @property
    def state(self) -> Tensors:
        """The optimizer's, as `<key>/<parameter>`; empty where nothing is remembered."""
        return self.files.get(OPTIMIZER, {})


def write(directory: Path, manifest: Manifest, files: Files, states: Mapping[int, bytes] | None = None) -> Written:
    """Write one snapshot, with what the scripts of ranks remember; when this returns it is on the disk, and a crash at
    any moment before leaves none.

    Raises CheckpointError when there is no space, no permission, or another process writes there, and for numbers that
    are not finite;
    older snapshots stay as they were.
    """
    try:
        check_finite(layout_of(manifest.tensors, None), files)
    except CheckpointError as error:
        message = (
            f"snapshot of version {manifest.version} not written, because no run could resume from it: {error.message}"
        )
        raise CheckpointError(message, fix="lower the learning rate; older snapshots are unchanged") from None
    final = directory / f"snapshot-{manifest.version:012d}-{manifest.server_incarnation}"
    with writing_to(directory):
        try:
            with new_snapshot(final) as folder:
                entries = {name: _write_file(folder / name, tensors) for name, tensors in files.items()}
                kept = {
                    rank: _write_state(folder / state_file(rank), payload) for rank, payload in (states or {}).items()
                }
                _write_manifest(folder, manifest.model_copy(update={"files": entries, "states": kept}))
        except (OSError, SafetensorError) as error:  # the library says only in words that the disk is full
            num_bytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise cannot_write(directory, f"{why}, for {num_bytes / 1e6:.1f} MB") from None
    return Written(final, entries[WEIGHTS].sha256, sum(entry.num_bytes for entry in entries.values()))


def _write_file(path: Path, tensors: Tensors) -> FileEntry:
    # The library writes from the tensors' own memory, with the GIL free. It makes files that only the owner may
    # read; whoever may read the directory may read the weights.
    save_file(dict(tensors), path)
    path.chmod(path.parent.stat().st_mode & 0o666)
    return _written(path)


def _write_state(path: Path, payload: bytes) -> FileEntry:
    path.write_bytes(payload)
    return _written(path)


def _written(path: Path) -> FileEntry:
    sync(path)
    return FileEntry(num_bytes=path.stat().st_size, sha256=sha256_of(path))


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    # What few runs have is left out elsewhere, so that older versions read those.
    absent = {"outer"} if manifest.outer is None else None
    text = manifest.model_dump_json(indent=1, by_alias=True, exclude=absent).encode()
    for name, content in ((MANIFEST, text), (_MANIFEST_HASH, _hash_line(text))):
        (folder / name).write_bytes(content)
        sync(folder / name)


def _hash_line(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def load(path: Path, is_verified: bool = False) -> Loaded:
    """One snapshot, every byte of it verified, unless that was done a moment ago. Raises CheckpointError with what is
    wrong with it."""
    try:
        manifest = _load_manifest(path)
        for name, entry in manifest.files.items():
            _check_file(path / name, entry, is_verified)
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


def _load_manifest(path: Path) -> Manifest:
    for name in (MANIFEST, _MANIFEST_HASH):
        if not (path / name).is_file():
            raise CheckpointError(f"it has no {name}")
    text = (path / MANIFEST).read_bytes()
    if (path / _MANIFEST_HASH).read_bytes() != _hash_line(text):
        raise CheckpointError(f"{MANIFEST} is not what was written: its SHA-256 differs from {_MANIFEST_HASH}")
    return read_manifest(text)


def _check_file(path: Path, entry: FileEntry, is_verified: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"it has no {path.name}")
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise CheckpointError(f"{path.name} has {num_bytes} bytes, {entry.num_bytes} were written")
    if not is_verified and sha256_of(path) != entry.sha256:
        raise CheckpointError(f"{path.name} is not what was written: its SHA-256 differs from the manifest's")
